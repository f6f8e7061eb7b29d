"""Turns conversations into token rows by the chat template's own rendering, one row per reply.

Knows nothing about models: a row is what is served before a reply, and the reply's own tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.formats import Conversation, Message, RowError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One supervised reply: ``prompt_ids`` [P] is served, ``response_ids`` [R] is what is answered.

    ``ended``: the ids include the end of the turn.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    ended: bool

    def cut(self, max_tokens: int) -> Reply:
        """At most ``max_tokens`` ids in all. Raises RowError when no reply token would be left."""
        room = max_tokens - len(self.prompt_ids)
        if room < 1:
            size = len(self.prompt_ids)
            raise RowError("too-long", f"the prompt has {size} tokens of {max_tokens}")
        if room >= len(self.response_ids):
            return self
        return Reply(prompt_ids=self.prompt_ids, response_ids=self.response_ids[:room], ended=False)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A tokenizer's chat template, with the arguments it is served with (``enable_thinking``).

    Every reply gets a row of its own, rendered with the conversation cut behind it: a template may
    rewrite history (strip thinking, drop tools), so an earlier reply inside a longer rendering need
    not be what was served. ``end_ids`` are ids that end a turn, besides the special tokens.

    Raises:
        ValueError: a tokenizer without a chat template.
    """

    tokenizer: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    end_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None  # rows of the target's embedding

    def __post_init__(self) -> None:
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template; put chat_template.jinja in its folder"
            )

    def prompt(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """The ids served before a reply to ``messages``. Raises RowError if the template refuses."""
        return self.ids(self._render(messages, tools, ask=True))

    def text(self, messages: Sequence[Message]) -> str:
        """The rendering of finished turns. Raises RowError if the template refuses."""
        return self._render(messages, None, ask=False)

    def replies(self, conversation: Conversation) -> list[Reply | RowError]:
        """For every assistant turn its row, or why it has none.

        Raises:
            RowError: the conversation has no reply at all.
        """
        messages, tools = conversation.messages, conversation.tools
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise RowError("no-reply", "no assistant turn to train on")
        found: list[Reply | RowError] = []
        for turn in turns:
            try:
                found.append(self.reply(messages[:turn], messages[turn], tools))
            except RowError as error:
                found.append(error)
        return found

    def reply(
        self,
        before: Sequence[Message],
        message: Message,
        tools: list[dict[str, Any]] | None = None,
        *,
        ended: bool = True,
    ) -> Reply:
        """The row of one reply; ``ended`` False leaves out the end of turn (a reply cut short).

        Raises:
            RowError: the template refuses, or shows no reply tokens (a mask of zeros), or no prompt
                (a mask of ones), or writes the reply behind something else than it asks with.
        """
        asked = self._render(before, tools, ask=True)
        text = self._render([*before, message], tools, ask=False)
        tagged = _GENERATION.search(self._source(tools)) is not None
        if not tagged and not text.startswith(asked):
            raise _mismatch(asked, text)
        messages = [*before, message]
        found = self._tagged(messages, tools, asked) if tagged else self._split(asked, text)
        if not found.response_ids:
            raise RowError("mask-all-zeros", "the template renders no reply tokens")
        if not found.prompt_ids:
            raise RowError("mask-all-ones", "the template marks everything as the reply")
        if not text.startswith(asked):  # tags or not: it would not be served like this
            raise _mismatch(asked, text)
        return found if ended else self._open(found, message)

    def _source(self, tools: Any) -> str:
        """The text of the template that is used: a tokenizer may have one for tools by itself."""
        template = self.tokenizer.chat_template
        if not isinstance(template, dict):
            return str(template)
        return str(template["tool_use" if tools and "tool_use" in template else "default"])

    def _render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, ask: bool
    ) -> str:
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=ask))

    def _apply(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, **options, **self.arguments
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise RowError("template-refused", str(error)) from error

    def ids(self, text: str) -> list[int]:
        """Ids of rendered text; its special tokens are in it. RowError: the target lacks one."""
        found = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.vocab_size is not None and max(found, default=0) >= self.vocab_size:
            lacks = f"token {max(found)}, the model has {self.vocab_size} embedding rows"
            raise RowError("not-servable", lacks)
        return found

    def _split(self, asked: str, text: str) -> Reply:
        """No tags in the template: the reply is what the rendering adds to the question."""
        prompt, whole = self.ids(asked), self.ids(text)
        if whole[: len(prompt)] == prompt:
            reply = whole[len(prompt) :]
        else:  # a token spans the border; served, the prompt's ids stand before the reply's
            reply = self.ids(text[len(asked) :])
            if self.decode(prompt + reply) != self.decode(whole):
                raise RowError("border-merged", "a token spans the border of prompt and reply")
        return self._until_end(prompt, reply)

    def _tagged(self, messages: list[Message], tools: Any, asked: str) -> Reply:
        """The template's own mask says where the last reply ends; it begins where the question does:
        whatever the template writes behind what is served, marked or not, the model has to say."""
        found = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
        if 1 not in mask:
            raise RowError("mask-all-zeros", "no token is inside {% generation %}")
        stop = len(mask) - mask[::-1].index(1)
        start = max((i + 1 for i in range(stop) if not mask[i]), default=0)
        prompt = self.ids(asked)
        if ids[: len(prompt)] == prompt:
            start = len(prompt)
        if stop < len(ids) and ids[stop] in self.ends and ids[stop - 1] not in self.ends:
            stop += 1  # the tags leave out the end of turn, which the model has to say
        return self._until_end(ids[:start], ids[start:stop])

    @property
    def ends(self) -> frozenset[int]:
        """Ids that may end a turn."""
        return self.end_ids | frozenset(self.tokenizer.all_special_ids)

    def _until_end(self, prompt: list[int], reply: list[int]) -> Reply:
        """Cut what the template writes after the end of turn: the model stops there."""
        last = max((i for i, token in enumerate(reply) if token in self.ends), default=None)
        if last is None or self.decode(reply[last + 1 :]).strip():
            return Reply(prompt_ids=prompt, response_ids=reply, ended=False)
        return Reply(prompt_ids=prompt, response_ids=reply[: last + 1], ended=True)

    def _open(self, reply: Reply, message: Message) -> Reply:
        """The same reply up to its last word: what the template closes was not said.

        That is the end of turn, and whatever it writes behind content or unfinished thinking.
        """
        if message.get("tool_calls"):
            raise RowError("bad-tool-call", "a call that was cut short")
        ids, ends = reply.response_ids, [0]
        text = self.decode(ids)
        for key in ("content", "reasoning_content", "reasoning", "thinking"):
            if said := str(message.get(key) or "").strip():
                ends.append(text.rfind(said) + len(said) if said in text else 0)
        # The fewest tokens that hold all of it.
        kept = bisect_left(range(len(ids)), max(ends), key=lambda n: len(self.decode(ids[:n])))
        if not max(ends):
            raise RowError("empty-content", f"nothing said: {message.get('content')!r}")
        return Reply(prompt_ids=reply.prompt_ids, response_ids=ids[:kept], ended=False)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _mismatch(asked: str, text: str) -> RowError:
    at = next(i for i, (a, b) in enumerate(zip(asked, text + "\0", strict=False)) if a != b)
    return RowError(
        "prompt-mismatch",
        f"the template asks with {asked[at:][:40]!r} but writes {text[at:][:40]!r} there; "
        "name the arguments it is served with (--template-arg enable_thinking=false)",
    )
