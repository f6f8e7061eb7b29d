"""The arrows between rooms point one way, files stay short, and importing the package stays light.

Knows nothing about what the code does: it reads the source of src/paceline, and one fresh process.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))

# A room may import every room of an earlier row. The package's own __init__ belongs to `api`.
LAYERS = (
    {"core", "provenance"},
    {"attention", "cache", "decode", "drafters", "gguf", "prepack", "support", "target"},
    {"pipeline"},
    {"api", "data", "engine", "hf", "train"},
    {"evaluate", "export", "serve"},
    {"cli", "recipes"},
)
# Within a row only these. Left out on purpose: decode -> drafters or target, train -> engine.
SIBLINGS = {
    ("api", "hf"),  # the package lists its public names
    ("attention", "cache"),
    ("hf", "api"),
    ("cli", "recipes"),
    ("train", "data"),  # training reads the rows that data writes, and their fingerprint
    ("drafters", "attention"),
    ("drafters", "cache"),
    ("drafters", "prepack"),
    ("drafters", "decode"),  # a drafter that samples draws with the same warp as the target
    ("support", "attention"),
    ("target", "support"),
    ("target", "attention"),
    ("target", "cache"),
    ("target", "gguf"),
    ("target", "prepack"),
}
DEPTH = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Path, or path::function, with the reason. An entry that is no longer needed fails, too.
LONGER: dict[str, str] = {
    "drafters/dflash.py": "config, module and folder format of one architecture stay together",
}


def module_name(path: Path) -> str:
    """The dotted name of a source file below src/paceline."""
    parts = ["paceline", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a dotted name; a public name of the package itself counts as `api`."""
    parts = module.split(".")
    is_module = len(parts) > 1 and (
        parts[1] in DEPTH or (SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").is_file()
    )
    return parts[1] if is_module else "api"


def imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of ours, at any depth, relative or by name."""
    base = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.expr):
            continue  # the others have no line and import nothing
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = base[: len(base) - node.level + 1] if node.level else []
            origin = [*origin, *([node.module] if node.module else [])]
            names = [".".join([*origin, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        for name in names:
            if name.split(".")[0] == "paceline":
                yield node.lineno, name


def wrong_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    """What this module imports and may not, as one sentence each."""
    room = room_of(module)
    if room not in DEPTH:
        return [f"{module}: room {room!r} is not in the table of rooms"]
    wrong = []
    for line, name in imported(ast.parse(source), module, is_package):
        other = room_of(name)
        if other not in DEPTH:
            wrong.append(f"{module}:{line} imports {name}, whose room is not in the table")
        elif not (other == room or DEPTH[other] < DEPTH[room] or (room, other) in SIBLINGS):
            wrong.append(f"{module}:{line} imports {name}: {room} must not know {other}")
    return wrong


def too_long(source: str, name: str) -> dict[str, int]:
    """Files and functions over the limit, with their lines (decorators and docstrings count)."""
    lines = {name: len(source.splitlines())} if source.count("\n") > MAX_FILE_LINES else {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            length = (node.end_lineno or first) - first + 1
            if length > MAX_FUNCTION_LINES:
                lines[f"{name}::{node.name}"] = length
    return lines


def docstring_is_enough(source: str) -> bool:
    """Whether a module says its purpose and, on a later line, what it does not know."""
    text = ast.get_docstring(ast.parse(source)) or ""
    return len([line for line in text.splitlines() if line.strip()]) >= 2


def test_there_is_source_to_check() -> None:
    assert {"core.py", "fit.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_arrows_point_one_way(path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert not wrong_arrows(path.read_text(encoding="utf-8"), module_name(path), is_package)


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path))
def test_module_says_purpose_and_what_it_does_not_know(path: Path) -> None:
    assert docstring_is_enough(path.read_text(encoding="utf-8")), "two lines, see design rule 6"


def test_files_and_functions_stay_short() -> None:
    found: dict[str, int] = {}
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        found.update(too_long(path.read_text(encoding="utf-8"), name))
    assert not {name: lines for name, lines in found.items() if name not in LONGER}
    assert not set(LONGER) - set(found), "no longer too long: remove from LONGER"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paceline.core", "from paceline.target import Target"),
        ("paceline.decode.loop", "import paceline.drafters.dflash"),
        ("paceline.decode.loop", "def f():\n    from paceline.target import load_target"),
        ("paceline.decode.warp", "from ..drafters import dflash"),
        ("paceline.decode.warp", "from .. import target"),
        ("paceline.drafters.model", "from paceline.target import load_target"),
        ("paceline.target", "from paceline import pipeline"),
        ("paceline.target", "from paceline import load"),
        ("paceline.pipeline", "import torch, paceline.api"),
        ("paceline.train.fit", "from paceline.engine.scheduler import Scheduler"),
        ("paceline.train.fit", "from paceline.recipes import smollm2"),
        ("paceline.export.plain", "if TYPE_CHECKING:\n    from paceline.cli import app"),
        ("paceline.core", "importlib.import_module('paceline.cli')"),
        ("paceline.cli", "from paceline.newroom import thing"),
        ("paceline.newroom", ""),
    ],
)
def test_a_wrong_arrow_is_found(
    module: str, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "newroom.py").touch()
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paceline.decode.loop", "from paceline.core import Row\nfrom .warp import warp"),
        ("paceline.drafters.model", "from paceline.attention import RaggedCache"),
        ("paceline.recipes.smollm2", "from paceline.train.config import TrainConfig"),
        ("paceline.evaluate.demo", "import paceline\nfrom paceline import load, pipeline"),
        ("paceline.core", "import torch\nfrom collections import abc\nopen('paceline.cli')"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str) -> None:
    assert not wrong_arrows(source, module)


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    assert not wrong_arrows("from . import warp", "paceline.decode", is_package=True)
    assert wrong_arrows("from .. import drafters", "paceline.decode", is_package=True)


def test_length_and_docstring_checks_find_what_they_should() -> None:
    body = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert too_long(body, "a.py") == {"a.py::f": MAX_FUNCTION_LINES + 1}
    assert not too_long("def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1), "a.py")
    assert too_long("\n" * (MAX_FILE_LINES + 1), "a.py") == {"a.py": MAX_FILE_LINES + 1}
    assert not too_long("\n" * MAX_FILE_LINES, "a.py")
    assert docstring_is_enough('"""Does this.\n\nDoes not know that.\n"""')
    assert not docstring_is_enough('"""Does this."""')
    assert not docstring_is_enough("x = 1")


def test_importing_the_package_leaves_heavy_and_optional_modules_out() -> None:
    heavy = ("typer", "rich", "gguf", "matplotlib", "fastapi", "datasets")
    script = f"import sys, paceline; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
