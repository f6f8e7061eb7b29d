"""Reads conversations of every common shape; a malformed row is reported and never stops the run.

Knows nothing about tokenizers, templates or models.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# Fields of a message that templates read; others (ids, weights, timestamps) are left behind.
_KEPT = ("reasoning_content", "reasoning", "thinking", "tool_call_id", "name")
_TABLES = {".parquet": "parquet", ".csv": "csv"}  # read by the datasets library
_SPLIT = re.compile(r"test|valid|dev|eval")  # the datasets library knows which of them to read
_PROMPTS = ("prompt", "question", "text")
_REPLIES = ("completion", "response")
_SYSTEM = ("system", "system_prompt")


class RowError(ValueError):
    """One row cannot be used. ``reason`` is a fixed word to count by; the message has the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages with roles system, developer, user, assistant and tool, in the order of the file.

    ``place`` is file:line, or file[index] for a JSON array or a data set.
    """

    messages: list[Message]
    place: str
    source: str
    tools: list[dict[str, Any]] | None = None

    @property
    def question(self) -> str:
        """The first user text: a label for people."""
        return next((str(m["content"]) for m in self.messages if m["role"] == "user"), "")


@dataclass
class Problems:
    """Rows that could not be used: each is passed to ``report`` at once and counted by reason."""

    report: Callable[[str], None] = lambda _: None
    counts: Counter[str] = field(default_factory=Counter)
    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, place: str, error: RowError) -> None:
        """Count the row at ``place`` and say why it was left out."""
        self.counts[error.reason] += 1
        self.rows.append({"place": place, "reason": error.reason, "detail": str(error)})
        self.report(f"{place}: {error}")


def read_conversations(
    source: str | Path, problems: Problems, limit: int | None = None
) -> Iterator[Conversation]:
    """The usable rows of a file (JSON lines, one array, .gz of either, .parquet, .csv), folder or
    ``datasets`` name.

    Rows hold ``messages``, ``conversations`` (ShareGPT: from, value), ``prompt`` with ``completion``
    or ``response``, or only ``prompt``, ``question``, ``text`` or ``turns``; ``tools`` may stand
    beside any. At most ``limit`` of them. Every other row goes to ``problems``.

    Raises:
        ValueError: no such file, or a data set that cannot be opened.
    """
    name = Path(source).name
    count = 0
    for place, found in raw_rows(source):
        if limit is not None and count >= limit:
            return
        try:
            if isinstance(found, RowError):
                raise found
            yield parse_row(found, place=place, source=name)
            count += 1
        except RowError as error:
            problems.add(place, error)


def parse_row(row: Any, *, place: str, source: str) -> Conversation:
    """One decoded row as a conversation. Raises RowError with the reason."""
    if not isinstance(row, dict):
        raise RowError("not-an-object", f"the row is a {type(row).__name__}")
    if "prompt_ids" in row and "response_ids" in row:
        raise RowError("already-tokens", "this is a training row; give the file to paceline train")
    messages = _with_system(row, [read_message(message) for message in _shape(row)])
    _check_order(messages)
    tools = _tools(row.get("tools"))
    _check_unicode(tools)
    return Conversation(
        messages=messages, place=place, source=str(row.get("source") or source), tools=tools
    )


def _shape(row: dict[str, Any]) -> list[Any]:
    """The row's messages as it wrote them, whatever its shape."""
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            if not isinstance(row[key], list):
                raise RowError("not-a-list", f"{key} is a {type(row[key]).__name__}")
            return list(row[key])
    reply = next((row[key] for key in _REPLIES if row.get(key) is not None), None)
    for key in _PROMPTS:
        if row.get(key) is not None:
            return _turns(row[key], "user") + ([] if reply is None else _turns(reply, "assistant"))
    if isinstance(row.get("turns"), list):
        return [turn for text in row["turns"] for turn in _turns(text, "user")]
    known = ", ".join(("messages", "conversations", *_PROMPTS, "turns"))
    raise RowError("no-known-field", f"the row has {', '.join(row) or 'nothing'}; known: {known}")


def _turns(value: Any, role: str) -> list[Any]:
    """A text as one message of ``role``; a list is messages already."""
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _with_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    """A row's ``system`` or ``system_prompt`` in front, unless its messages begin with one."""
    text = next((row[key] for key in _SYSTEM if row.get(key)), None)
    if text is None or messages[:1] and messages[0]["role"] in ("system", "developer"):
        return messages
    return [read_message({"role": "system", "content": text}), *messages]


def read_message(raw: Any) -> Message:
    """One message with our role names and the fields that templates read. Raises RowError."""
    if not isinstance(raw, dict):
        raise RowError("not-an-object", f"a message is a {type(raw).__name__}")
    name = raw.get("role", raw.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowError("unknown-role", f"{name!r} is not one of {', '.join(ROLES)}")
    message: Message = {"role": role}
    calls = raw.get("tool_calls") if role == "assistant" else None
    content = raw.get("content", raw.get("value"))
    if name == "function_call":  # the call, as JSON text
        calls, content = _parsed(content), None
    thought = any(isinstance(raw.get(key), str) and raw[key].strip() for key in _KEPT[:3])
    if content is None and (calls or thought):
        content = ""
    message["content"] = _text(content)
    if not message["content"].strip() and not calls and not thought and role in _SPEAKS:
        raise RowError("empty-content", f"the {role} says nothing")
    message |= {key: raw[key] for key in _KEPT if isinstance(raw.get(key), str)}
    if calls:
        message["tool_calls"] = _calls(calls)
    _check_unicode(message)
    return message


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise RowError("bad-tool-call", "the function_call is not JSON") from None


def _check_unicode(value: Any) -> None:
    """JSON may spell half a surrogate pair; no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowError("not-unicode", f"half a surrogate pair ({error.reason})") from None


_SPEAKS = ("user", "assistant")  # a tool may answer with nothing


def _text(content: Any) -> str:
    if content is None:
        raise RowError("null-content", "a message has no content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise RowError("not-text", "content is neither text nor a list of text parts")


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: templates write them as JSON themselves."""
    out = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("bad-tool-call", "a tool call names no function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise RowError("bad-tool-call", "its arguments are not JSON") from None
        named = {key: call[key] for key in ("id",) if key in call}
        function = {"name": function["name"], "arguments": arguments}
        out.append(named | {"type": "function", "function": function})
    return out


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError):
            raise RowError("bad-tools", "tools is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("bad-tools", "tools is not a list of schemas")
    return tools


def _check_order(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    spoken = [role for role in roles if role not in ("system", "developer")]
    if not roles:
        raise RowError("empty", "no message")
    if not spoken:
        raise RowError("system-only", "only system messages")
    if spoken[0] != "user":
        raise RowError(f"{spoken[0]}-first", "the first speaker must be the user")


def raw_rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Place and decoded row, or place and the RowError of bytes that hold none."""
    path = Path(source)
    if path.suffix in _TABLES or not path.is_file():
        if path.suffix in (".jsonl", ".json", ".gz", ".txt"):
            raise ValueError(f"{path}: no such file")
        if path.is_dir() and (files := _json_files(path)):
            for file in files:  # line by line: a broken one does not make the others useless
                yield from raw_rows(file)
            return
        yield from _dataset_rows(source)
        return
    opened: Any = gzip.open if path.suffix == ".gz" else open
    stream: IO[bytes]
    try:
        with opened(path, "rb") as stream:
            start = stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
            stream.seek(0)
            # One array is what ShareGPT dumps are; a line of JSON lines that is one is malformed.
            if start[:1] == b"[" and path.name.removesuffix(".gz").endswith(".json"):
                yield from _array_rows(path, stream.read())
            else:
                yield from _lines(path, stream)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error})") from None


def _lines(path: Path, stream: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    for number, raw in enumerate(stream, start=1):  # line feeds only: JSON text may hold U+2028
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            if line.strip():
                yield f"{path}:{number}", json.loads(line.rstrip())
        except UnicodeDecodeError as error:
            yield f"{path}:{number}", RowError("not-utf-8", f"byte {error.start} of the line")
        except (ValueError, RecursionError) as error:
            yield f"{path}:{number}", RowError("broken-json", str(error))


def _array_rows(path: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not one JSON array ({error}); JSON lines end in .jsonl"
        ) from None
    for index, row in enumerate(rows):
        yield f"{path}[{index}]", row


def _json_files(folder: Path) -> list[Path]:
    """The JSON files of a folder that holds no other kind of data, and no splits."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name[0] != "."]
    kept = [file for file in files if file.name.removesuffix(".gz").endswith((".json", ".jsonl"))]
    others = [file for file in files if file not in kept and file.suffix != ".md"]
    splits = [file for file in kept if _SPLIT.search(file.name.lower())]
    return [] if others or splits or (folder / "dataset_dict.json").exists() else kept


def _dataset_rows(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Rows of a table, folder or hub name, by the ``datasets`` library; ``NAME:SPLIT`` or
    ``NAME:CONFIG:SPLIT``; default train."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"{source}: no such file; to read it as a data set: pip install 'paceline[train]'"
        ) from None
    name, *rest = str(source).split(":")
    kind, saved = _TABLES.get(Path(name).suffix), (Path(name) / "state.json").exists()
    if rest and (kind or saved):
        raise ValueError(f"{source}: {name} has no splits; leave {':'.join(rest)!r} out")
    config, split = (
        (None, "train") if not rest else (rest[0], rest[1]) if rest[1:] else (None, rest[0])
    )
    try:
        if kind is not None:
            rows = datasets.load_dataset(kind, data_files=name, split="train")
        elif saved:
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises many kinds; each means the name is of no use
        raise ValueError(f"{source}: neither a file nor a data set ({error})") from error
    for index, row in enumerate(rows):
        yield f"{source}[{index}]", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """A data set fills the fields that only other rows have with null; content null stays."""
    if isinstance(value, dict):
        kept = ("content", "value")
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in kept}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
