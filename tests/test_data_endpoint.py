"""Replies over HTTP: bounded concurrency, patience, named failures, resume; against a local server.

Does not know real models or a real engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from chat import THINKING, byte_tokenizer
from paceline.data.endpoint import Client, Endpoint, EndpointError, _retry_after
from paceline.data.fingerprint import Fingerprint
from paceline.data.formats import Problems, RowError, parse_row
from paceline.data.regenerate import Answer, Settings, regenerate
from paceline.data.rows import RowFile
from paceline.data.template import Template

PRINT = Fingerprint(weights="w", tokenizer="t", template="c")
Reply = tuple[int, Any, dict[str, str]]  # status, body, headers


def said(text: str, finish: str = "stop", **message: Any) -> Reply:
    found = {"role": "assistant", "content": text, **message}
    return 200, {"choices": [{"message": found, "finish_reason": finish}]}, {}


class Server:
    """Answers with ``script(body, how often this body came)``; keeps what it was asked."""

    def __init__(self, script: Callable[[dict[str, Any], int], Reply]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                with lock:
                    count = self.asked.count(body)
                    self.asked.append(body)
                    self.paths.append(handler.path)
                    self.keys.append(handler.headers.get("Authorization"))
                    self.now += 1
                    self.most = max(self.most, self.now)
                status, found, headers = script(body, count)
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                with lock:
                    self.now -= 1
                handler.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    handler.send_header(name, value)
                handler.end_headers()
                handler.wfile.write(data)

            def log_message(handler, *_: Any) -> None:
                """Quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def prompts(self) -> list[str]:
        """The last message of each request, in the order of arrival."""
        return [body["messages"][-1]["content"] for body in self.asked]

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers: list[Server] = []

    def start(script: Callable[[dict[str, Any], int], Reply]) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def answer(
    path: Path,
    url: str,
    rows: list[Any],
    *,
    concurrency: int = 2,
    tries: int = 3,
    template: Any = None,
    settings: Settings | None = None,
) -> tuple[dict[str, int], Problems]:
    template = template or Template(tokenizer=byte_tokenizer())
    settings = settings or Settings(max_new_tokens=7)
    client = Client(url=url, model="m", tries=tries, pause=0.01, timeout=5)
    source, problems = Endpoint(client, template, settings, concurrency=concurrency), Problems()
    chats = (parse_row(row, place=f"in:{n}", source="in") for n, row in enumerate(rows, 1))
    try:
        with RowFile(path, PRINT, {}) as out:
            return regenerate(chats, source, template, out, problems, settings), problems
    finally:
        source.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(count: int) -> list[Any]:
    return [{"prompt": f"p{n}"} for n in range(count)]


def test_replies_become_rows_of_our_own_template(serve: Any, tmp_path: Path) -> None:
    server = serve(
        lambda body, _: said(
            body["messages"][-1]["content"].upper(), body["messages"][0]["content"]
        )
    )
    path = tmp_path / "rows.jsonl"
    settings = Settings(max_new_tokens=7, temperature=0.5, top_p=0.9, seed=3)
    # The first user text is what the server gives as its reason to end.
    rows = [{"turns": ["stop", "more"]}, {"prompt": "length"}]
    answer(path, server.url, rows, settings=settings, concurrency=1)
    made = Template(tokenizer=byte_tokenizer())
    found = {row["key"]: row for row in lines(path)}.values()
    assert [(made.decode(r["response_ids"]), r["finish"], r["temperature"]) for r in found] == [
        ("STOP<|im_end|>", "stop", 0.5),
        ("MORE<|im_end|>", "stop", 0.5),
        ("LENGTH", "length", 0.5),
    ]
    second = server.asked[1]
    assert [m["content"] for m in second["messages"]] == ["stop", "STOP", "more"]
    assert (second["model"], second["max_tokens"], second["temperature"], second["top_p"]) == (
        "m", 7, 0.5, 0.9
    )  # fmt: skip
    assert len({body["seed"] for body in server.asked}) == 3 and "tools" not in second
    history = [{"role": m["role"], "content": m["content"]} for m in second["messages"]]
    assert lines(path)[1]["prompt_ids"] == made.prompt(history)


def test_thinking_tools_and_template_arguments_go_both_ways(serve: Any, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    server = serve(
        lambda body, _: (
            said("Two.")
            if body["messages"][-1]["role"] == "tool"
            else said("", "tool_calls", reasoning_content="Add.", content=None, tool_calls=[call])
        )
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {
        "messages": [{"role": "user", "content": "1+1"}, asked, {"role": "tool", "content": "2"}],
        "tools": tools,
    }
    made = Template(tokenizer=byte_tokenizer(THINKING), arguments={"enable_thinking": True})
    settings = Settings(template={"enable_thinking": True})
    answer(tmp_path / "rows.jsonl", server.url, [row], template=made, settings=settings)
    first, second = lines(tmp_path / "rows.jsonl")
    assert made.decode(first["response_ids"]) == (
        '<think>\nAdd.\n</think>\n\n<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>'
    )
    assert made.decode(second["response_ids"]).endswith("Two.<|im_end|>")
    assert server.asked[0]["tools"] == tools
    assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": True}
    sent = server.asked[1]["messages"][1]["tool_calls"][0]["function"]
    assert sent == {"name": "add", "arguments": '{"a": 1}'}  # text, as the protocol has it


def test_a_looping_reply_is_cut_and_the_next_turn_sees_the_cut(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda body, _: said("once " + "and again " * 30, "length"))
    counts, _ = answer(tmp_path / "rows.jsonl", server.url, [{"turns": ["Hi", "Go on"]}])
    assert counts["loops"] == 2 and {r["finish"] for r in lines(tmp_path / "rows.jsonl")} == {
        "loop"
    }
    assert server.asked[1]["messages"][1]["content"] == "once and again"


def test_concurrency_reaches_its_bound_and_never_exceeds_it(serve: Any, tmp_path: Path) -> None:
    together = threading.Barrier(3)  # breaks, and with it the run, unless three are open at once

    def script(body: dict[str, Any], count: int) -> Reply:
        together.wait(timeout=10)
        time.sleep(0.02)  # a fourth would show up meanwhile
        return said("ok")

    server = serve(script)
    counts, _ = answer(tmp_path / "rows.jsonl", server.url, prompts(12), concurrency=3)
    assert counts["rows"] == 12 and server.most == 3


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_passing_failure_is_tried_again(status: int, serve: Any, tmp_path: Path) -> None:
    server = serve(lambda _, count: said("ok") if count == 2 else (status, {"error": "busy"}, {}))
    counts, problems = answer(tmp_path / "rows.jsonl", server.url, prompts(3))
    assert counts["rows"] == 3 and not problems.rows and len(server.asked) == 9


def test_bodies_that_are_cut_or_no_json_are_tried_again(serve: Any, tmp_path: Path) -> None:
    broken = {0: (200, b"<html>", {}), 1: (200, b'{"choices"', {})}
    server = serve(lambda _, count: broken.get(count, said("ok")))
    counts, _ = answer(tmp_path / "rows.jsonl", server.url, prompts(1))
    assert counts["rows"] == 1 and len(server.asked) == 3


def test_waits_double_with_jitter_and_obey_the_server(serve: Any) -> None:
    waits: list[float] = []
    after = {2: {"Retry-After": "7"}}
    server = serve(lambda _, count: (429, {}, after.get(count, {})))
    client = Client(url=server.url, model="m", tries=9, pause=2.0, sleep=waits.append)
    with pytest.raises(RowError, match="endpoint-failed: HTTP 429 .*9 times"):
        client.chat({"messages": []})
    assert len(waits) == 8 and waits[2] == 7
    for number, wait in enumerate(waits):
        longest = min(60.0, 2.0 * 2**number)
        assert number == 2 or longest / 2 <= wait <= longest


@pytest.mark.parametrize(
    "header, seconds",
    [(None, None), ("3", 3.0), ("-1", 0.0), ("inf", 600.0), ("soon", None),
     ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    assert _retry_after(header) == seconds


def test_a_row_that_fails_every_time_is_named_and_the_others_go_on(
    serve: Any, tmp_path: Path
) -> None:
    bad = {"p1": (500, "down", {}), "p3": (400, "too long", {}), "p4": (200, {"choices": []}, {})}
    server = serve(lambda body, _: bad.get(body["messages"][-1]["content"], said("ok")))
    counts, problems = answer(tmp_path / "rows.jsonl", server.url, prompts(6))
    assert counts["rows"] == 3
    assert {(p["place"], p["reason"]) for p in problems.rows} == {
        ("in:2", "endpoint-failed"),
        ("in:4", "endpoint-refused"),
        ("in:5", "endpoint-garbled"),
    }
    detail = {p["reason"]: p["detail"] for p in problems.rows}
    assert 'HTTP 500 "down", 3 times' in detail["endpoint-failed"]
    assert server.prompts().count("p1") == 3 and server.prompts().count("p3") == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_address_ends_the_run_with_the_fix(
    status: int, serve: Any, tmp_path: Path
) -> None:
    server = serve(lambda *_: (status, {}, {}))
    fix = "check --endpoint and --model" if status == 404 else "OPENAI_API_KEY"
    with pytest.raises(EndpointError, match=rf"HTTP {status} .*{fix}"):
        answer(tmp_path / "rows.jsonl", server.url, prompts(9), concurrency=1)
    assert len(server.asked) == 1


def test_a_server_that_dies_ends_the_run_and_the_next_asks_only_what_is_missing(
    serve: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    dying = serve(
        lambda body, _: said("ok") if body["messages"][-1]["content"] < "p5" else (500, "", {})
    )
    rows = [{"prompt": f"p{n:02}"} for n in range(30, 80)]  # 20 are answered
    with pytest.raises(EndpointError, match="the last 8 requests failed; run again to resume"):
        answer(path, dying.url, rows, tries=1, concurrency=1)
    kept = path.read_bytes()
    assert len(kept.splitlines()) == 20 and len(dying.asked) == 28
    path.write_bytes(kept[:-5])  # and it was killed while writing
    back = serve(lambda *_: said("ok"))
    counts, problems = answer(path, back.url, rows)
    assert counts["rows"] == 31 and not problems.rows
    assert sorted(back.prompts()) == [f"p{n}" for n in range(49, 80)]
    assert len({row["key"] for row in lines(path)}) == 50 == len(lines(path))


def test_failures_among_replies_do_not_end_the_run(serve: Any, tmp_path: Path) -> None:
    def script(body: dict[str, Any], count: int) -> Reply:
        number = int(body["messages"][-1]["content"][1:])
        return said("ok") if number % 4 == 0 else (500, "", {})

    server = serve(script)
    counts, problems = answer(
        tmp_path / "rows.jsonl", server.url, prompts(40), tries=1, concurrency=1
    )
    assert counts["rows"] == 10 and problems.counts == {"endpoint-failed": 30}


def test_nothing_is_tried_any_more_once_the_run_is_over(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda *_: (429, {}, {"Retry-After": "600"}))
    settings, template = Settings(), Template(tokenizer=byte_tokenizer())
    source = Endpoint(Client(url=server.url, model="m"), template, settings, concurrency=1)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(_error_of(source._client)))
    waiting.start()
    while not server.asked:
        time.sleep(0.01)
    source.close()
    waiting.join(timeout=10)
    assert "the run was stopped" in str(found[0]) and len(server.asked) == 1


def _error_of(client: Client) -> RowError:
    with pytest.raises(RowError) as caught:
        client.chat({"messages": []})
    return caught.value


def test_requests_that_are_open_do_not_hold_the_process(serve: Any) -> None:
    release = threading.Event()

    def slow(*_: Any) -> Reply:
        release.wait(30)
        return said("late")

    server = serve(slow)
    script = (
        "import threading; from paceline.data.endpoint import Client, Endpoint\n"
        f"source = Endpoint(Client(url={server.url!r}, model='m'), None, None)\n"
        "source._ask = lambda ask: source._client.chat({'messages': []})\n"
        "source.submit(None)\n"
        "source.close()\n"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    release.set()
    assert time.monotonic() - began < 25


def test_a_refusal_that_breaks_off_is_tried_again(serve: Any) -> None:
    cut = (500, b"no size\r\n", {"Transfer-Encoding": "chunked"})
    server = serve(lambda _, count: cut if count < 2 else said("ok"))
    client = Client(url=server.url, model="m", pause=0.001, timeout=1.0)
    assert client.chat({"messages": []})["choices"] and len(server.asked) == 3


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_the_key_does_not_follow_a_redirect(
    serve: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = serve(lambda *_: said("ok"))
    there = f"{other.url}/v1/chat/completions"
    server = serve(lambda *_: (status, {}, {"Location": there}))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with pytest.raises(EndpointError, match=rf"HTTP {status}, moved to {other.url}"):
        Client(url=server.url, model="m").chat({"messages": []})
    assert not other.asked


def test_a_server_that_answers_nothing_is_given_up_and_one_that_refuses_some_is_not(
    serve: Any, tmp_path: Path
) -> None:
    server = serve(lambda *_: (400, {"error": "no"}, {}))
    with pytest.raises(EndpointError, match="the last 8 requests failed"):
        answer(tmp_path / "none.jsonl", server.url, prompts(40), concurrency=1)
    assert len(server.asked) == 8
    server = serve(lambda body, _: said("ok") if len(server.asked) < 5 else (400, {}, {}))
    counts, problems = answer(tmp_path / "some.jsonl", server.url, prompts(40), concurrency=1)
    assert counts["rows"] == 4 and problems.counts == {"endpoint-refused": 36}


def test_replies_of_odd_shapes(serve: Any, tmp_path: Path) -> None:
    deep = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    replies = [
        (200, {"choices": [{"message": {"content": "no role"}, "finish_reason": "stop"}]}, {}),
        (200, deep, {}),
        (200, {"choices": [{"message": {"role": "assistant", "content": None}}]}, {}),
    ]
    server = serve(lambda *_: replies[len(server.asked) - 1])
    counts, problems = answer(tmp_path / "rows.jsonl", server.url, prompts(3), concurrency=1)
    assert counts["rows"] == 1 and problems.counts == {"endpoint-garbled": 2}


def test_addresses_and_keys(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda *_: said("ok"))
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for tail in ("", "/", "/v1", "/v1/", "/v1/chat/completions"):
        Client(url=server.url + tail, model="m").chat({"messages": []})
    assert set(server.paths) == {"/v1/chat/completions"} and set(server.keys) == {"Bearer secret"}
    with pytest.raises(ValueError, match="start it with http"):
        Client(url="localhost:8000", model="m")


def test_a_server_that_is_not_there_is_said_at_once(serve: Any) -> None:
    server = serve(lambda *_: said("ok"))
    Client(url=server.url, model="m").find()  # it does not know GET, but it is there
    server.close()
    began = time.monotonic()
    with pytest.raises(EndpointError, match=r"nobody answers there .*; start the server"):
        Client(url=server.url, model="m").find()
    with pytest.raises(EndpointError, match="nobody answers there"):
        Client(url="http://no-such-host.invalid", model="m").find()
    assert time.monotonic() - began < 5


def test_replies_that_came_before_a_fatal_refusal_are_kept() -> None:
    """The queue is emptied first: replies of the same moment cost minutes on a real server."""
    template, settings = Template(tokenizer=byte_tokenizer()), Settings()
    source = Endpoint(Client(url="http://unused", model="m"), template, settings, concurrency=3)
    reply: Any = Answer(response_ids=[1], finish="stop", message={})
    ask: Any = object()
    for found in (EndpointError("wrong key"), reply, reply, EndpointError("wrong key")):
        source._done.put((ask, found))
    assert source.collect() == source.collect() == [(ask, reply)]
    with pytest.raises(EndpointError, match="wrong key"):
        source.collect()
