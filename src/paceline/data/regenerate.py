"""The target answers given conversations itself: prompts in, rows of its own replies out.

Knows nothing about HTTP; where a reply comes from is an ``Answerer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any, Protocol

from paceline.core import Row, SamplingParams
from paceline.data.formats import Conversation, Message, Problems, RowError
from paceline.data.loops import loop_start
from paceline.data.rows import RowFile, conversation_key, row_key
from paceline.data.template import Template
from paceline.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How replies are drawn; part of every row's key. ``template``: arguments it is served with.

    Each row's seed comes from ``seed`` and its key, so a reply depends on no other row.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What decides a reply: greedy ones have no seed and no top-p."""
        greedy = self if self.temperature else replace(self, seed=0, top_p=1.0)
        return asdict(greedy)

    def seed_of(self, key: str) -> int:
        """The sampling seed of one row, below 2**31."""
        return (int(key[:12], 16) + self.seed) % 2**31


@dataclass(kw_only=True)
class Ask:
    """One question: what was said so far, and the conversation to go on with."""

    walk: Walk
    messages: list[Message]
    key: str
    prompt_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The reply as ids, and as the message that later turns of the conversation see."""

    response_ids: list[int]
    finish: str  # stop, length or loop
    message: Message


@dataclass
class Walk:
    """Where a conversation stands. A question is due behind user turns and tool results.

    The target's reply takes the place of the file's in what follows, except where the file's calls
    a tool: the result that comes next answers that call.
    """

    conversation: Conversation
    at: int = 0
    history: list[Message] = field(default_factory=list)

    def question(self) -> list[Message] | None:
        """The messages up to the next reply that is due; None at the end."""
        given = self.conversation.messages
        while self.at < len(given):
            message = given[self.at]
            self.at += 1
            if message["role"] != "assistant":
                self.history.append(message)
            following = given[self.at]["role"] if self.at < len(given) else None
            if message["role"] in ("user", "tool") and following != "tool":
                return list(self.history)
        return None

    def answered(self, reply: Message) -> None:
        """Go on behind the reply."""
        rest = self.conversation.messages[self.at :]
        given = takewhile(lambda message: message["role"] == "assistant", rest)
        self.history.append(next((m for m in given if m.get("tool_calls")), reply))


class Answerer(Protocol):
    """A source of replies that works on many questions at once."""

    slots: int  # how many questions it holds at a time

    def submit(self, ask: Ask) -> None:
        """Begin one; at most ``slots`` may be open. Raises RowError if it cannot be answered."""

    def collect(self) -> list[tuple[Ask, Answer | RowError]]:
        """Work until something is finished, or for one step; returns what is finished."""

    def close(self) -> None:
        """Let go of what is still open."""


def regenerate(
    conversations: Iterable[Conversation],
    answerer: Answerer,
    template: Template,
    out: RowFile,
    problems: Problems,
    settings: Settings,
    *,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, int]:
    """Append one row per question, in the order of finishing. Returns counts.

    Questions whose key is in ``out`` are not asked again: run the same command to resume.
    """
    counts = {"rows": 0, "tokens": 0, "supervised": 0, "repeated": 0, "loops": 0}
    fresh = map(Walk, conversations)
    asks = _Asks(template, out, problems, settings, counts)
    waiting: list[Ask] = []  # next turns of conversations that are under way come first
    held = 0
    while True:
        while held < answerer.slots and (ask := waiting.pop() if waiting else asks.next(fresh)):
            try:
                answerer.submit(ask)
                held += 1
            except RowError as error:
                asks.failed(ask, error)
        if not held:
            return counts
        for ask, answer in answerer.collect():
            held -= 1
            if isinstance(answer, RowError):
                asks.failed(ask, answer)
                continue
            out.append(_row(ask, answer, settings))
            counts["rows"] += 1
            counts["tokens"] += len(ask.prompt_ids) + len(answer.response_ids)
            counts["supervised"] += len(answer.response_ids)
            counts["loops"] += answer.finish == "loop"
            progress(len(answer.response_ids))
            waiting += asks.following(ask, answer.message)


@dataclass
class _Asks:
    """Turns walks into questions that are neither answered nor being answered."""

    template: Template
    out: RowFile
    problems: Problems
    settings: Settings
    counts: dict[str, int]
    open: dict[str, list[Walk]] = field(default_factory=dict)  # key: who else waits for its reply

    def next(self, walks: Iterator[Walk]) -> Ask | None:
        """The next open question of these walks."""
        for walk in walks:
            while messages := walk.question():
                conversation = walk.conversation
                key = row_key(
                    messages=messages, tools=conversation.tools, settings=self.settings.facts()
                )
                if key in self.out:
                    self.counts["repeated"] += 1
                    walk.answered(self.out.row(key)["reply"])
                    continue
                if key in self.open:  # the same question again; its reply will serve both
                    self.counts["repeated"] += 1
                    self.open[key].append(walk)
                    break
                try:
                    ids = self.template.prompt(messages, conversation.tools)
                except RowError as error:
                    self.problems.add(conversation.place, error)
                    break
                self.open[key] = []
                return Ask(walk=walk, messages=messages, key=key, prompt_ids=ids)
        return None

    def following(self, ask: Ask, reply: Message) -> list[Ask]:
        """The next questions of the conversations that waited for this reply."""
        found = []
        for walk in (ask.walk, *self.open.pop(ask.key)):
            walk.answered(reply)
            found.append(self.next(iter([walk])))
        return [ask for ask in found if ask]

    def failed(self, ask: Ask, error: RowError) -> None:
        """Report every conversation that ends here for want of a reply."""
        for walk in (ask.walk, *self.open.pop(ask.key)):
            self.problems.add(walk.conversation.place, error)


def _row(ask: Ask, answer: Answer, settings: Settings) -> dict[str, Any]:
    return {
        "source": ask.walk.conversation.source,
        "prompt": ask.walk.conversation.question,
        "temperature": settings.temperature,
        "prompt_ids": ask.prompt_ids,
        "response_ids": answer.response_ids,
        "finish": answer.finish,
        "key": ask.key,
        "conversation": conversation_key(ask.walk.conversation),
        "reply": answer.message,
    }


class InProcess:
    """Answers with our own decode loop: rows join as others finish, so the batch stays full.

    A reply that repeats itself is ended early and cut where it began to; see ``loop_start``.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings, *, batch_size: int = 8) -> None:
        self.slots = batch_size
        self._pipeline, self._settings = pipeline, settings
        self._session = pipeline.session(batch_size)
        self._asks: dict[int, Ask] = {}  # by slot

    def submit(self, ask: Ask) -> None:
        """Put the question into a free row. RowError: longer than the model's context, or bad ids."""
        params = SamplingParams(
            max_tokens=self._settings.max_new_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            seed=self._settings.seed_of(ask.key),
        )
        size, limit = len(ask.prompt_ids), self._pipeline.target.max_length
        if size >= limit:
            raise RowError(
                "too-long", f"the prompt has {size} tokens, the model's context is {limit}"
            )
        try:
            (row,) = self._pipeline.rows([ask.prompt_ids], params)
        except ValueError as error:  # a tokenizer with more ids than the model
            raise RowError("not-servable", str(error)) from error
        self._session.add(row)
        self._asks[row.slot] = ask

    def collect(self) -> list[tuple[Ask, Answer | RowError]]:
        """One decode round of all rows."""
        done: list[tuple[Ask, Answer | RowError]] = []
        for row, ids in self._session.step():
            if row.finish_reason is not None:
                done.append((self._asks.pop(row.slot), self._answer(row)))
            elif len(row.output) // 32 > (len(row.output) - len(ids)) // 32 and _loops(row):
                row.limit = len(row.tokens) + 1  # the next round is its last
        return done

    def close(self) -> None:
        """Nothing to let go of: no work goes on between calls."""

    def _answer(self, row: Row) -> Answer:
        ids, finish = row.output, row.finish_reason or "length"
        start = loop_start(ids)
        if start < len(ids):
            ids, finish = ids[:start], "loop"
        text = self._pipeline.target.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(
            response_ids=ids, finish=finish, message={"role": "assistant", "content": text}
        )


def _loops(row: Row) -> bool:
    tail = row.output[-192:]  # a loop lies within 128 tokens; looked for every 32
    return loop_start(tail) < len(tail)
