"""Streaming text: pieces join to the whole decode, split no character, and never show a stop.

Does not know any model; it needs the embedded default's tokenizer and a small byte-fallback one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from paceline.decode.text import Detokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's byte-level tokenizer."""
    from transformers import AutoTokenizer

    from paceline.gguf import convert_gguf, smollm2_gguf

    try:
        folder: Path = convert_gguf(smollm2_gguf())
    except ValueError as absent:
        pytest.skip(str(absent))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def fallback() -> Any:
    """A tokenizer of Llama 2's kind: unknown characters become one token per byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁", *"abc", "▁a", "ab", "▁ab", "漢"]
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("a", "b"), ("▁", "ab")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def random_texts(count: int) -> list[str]:
    """Words, spaces and characters of one to four bytes, in long runs and short ones."""
    source = random.Random(1)
    letters = ["a", "b", " ", "é", "漢", "字", "🦜", "👩‍🚀", "ab", " ab"]
    return [
        "".join(source.choice(letters) * source.choice([1, 1, 2, 7]) for _ in range(12))
        for _ in range(count)
    ]


TEXTS = [
    "Plain words, don't you think ?",
    "emoji 👩‍🚀🏳️‍🌈 then 漢字とかな, עברית, ก็ and é",
    "🦜" * 40,
    "\n\n  spaces\t\tand tabs \n",
    "",
]


def _stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        if detokenizer.push(token) is not None:
            break
        pieces.append(detokenizer.take())
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(tokenizer: Any, text: str) -> None:
    """No piece holds half a character, and nothing is lost."""
    ids = tokenizer(text)["input_ids"]
    pieces = _stream(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["tokenizer", "fallback"])
def test_random_text_cut_anywhere(kind: str, request: pytest.FixtureRequest) -> None:
    """Where the ids end inside a character, only U+FFFD follows what is whole."""
    tokenizer = request.getfixturevalue(kind)
    for text in ["🦜🦜🦜🦜🦜🦜 ab", *random_texts(15)]:
        ids = tokenizer(text)["input_ids"]
        assert "".join(_stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids) == text
        for end in range(len(ids)):
            got = "".join(_stream(Detokenizer(tokenizer), ids[:end]))
            want = tokenizer.decode(ids[:end])
            assert got == want if "\ufffd" not in want else text.startswith(got.rstrip("\ufffd"))


def test_random_ids_join_to_the_whole_decode(tokenizer: Any) -> None:
    """Also where the bytes are no UTF-8 at all, and with special tokens in between."""
    source = random.Random(0)
    for _ in range(40):
        ids = [source.choice([source.randrange(300), source.randrange(49152)]) for _ in range(60)]
        pieces = _stream(Detokenizer(tokenizer), ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_cost_does_not_grow_with_the_reply(tokenizer: Any) -> None:
    """No decode call sees more than a short window."""
    spy = Spy(tokenizer)
    _stream(Detokenizer(spy), tokenizer("word and 漢字 🦜 " * 100)["input_ids"])
    assert spy.longest < 32


def test_cost_is_bounded_for_bytes_that_are_no_text(fallback: Any) -> None:
    """Endless broken bytes and endless special tokens, and nothing after them is lost."""
    broken, end = fallback.convert_tokens_to_ids(["<0xF0>", "</s>"])
    text = fallback("ab 漢")["input_ids"]
    for filler in (broken, end):
        spy = Spy(fallback)
        shown = "".join(_stream(Detokenizer(spy), [*text, *[filler] * 500, *text]))
        assert shown == fallback.decode([*text, *[filler] * 500, *text], skip_special_tokens=True)
        assert spy.longest <= 64


class Spy:
    """A tokenizer that remembers the longest list it decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.longest = tokenizer, 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.longest = max(self.longest, len(ids))
        text: str = self.tokenizer.decode(ids, **options)
        return text


@pytest.mark.parametrize("stop", ["漢字", "🦜", "END", "E", "wor", "ld EN"])
def test_a_stop_string_is_never_shown(tokenizer: Any, stop: str) -> None:
    """Not even its beginning; the pieces join to the text before it."""
    text = "hello EN world END 🦜 漢字 tail"
    detokenizer = Detokenizer(tokenizer, [stop])
    pieces = _stream(detokenizer, tokenizer(text)["input_ids"])
    assert detokenizer.stopped == stop
    assert "".join(pieces) == text[: text.index(stop)]


def test_possible_beginning_is_released_when_it_is_none(tokenizer: Any) -> None:
    """Held-back text comes out once it cannot be the stop string, or at the end."""
    ids = tokenizer("a ENx EN")["input_ids"]
    assert "".join(_stream(Detokenizer(tokenizer, ["END"]), ids)) == "a ENx EN"


def test_stop_before_half_a_character_is_seen_at_once(tokenizer: Any) -> None:
    """A token may end one word and begin a character; the word's part is certain already."""
    mixed = [
        i for i in range(49152)
        if (piece := tokenizer.decode([i])).endswith("\ufffd") and piece[:1] == " "
    ]  # fmt: skip
    for token in mixed[:5]:
        detokenizer = Detokenizer(tokenizer, [" "])
        assert detokenizer.push(token) == " " and detokenizer.text == ""
