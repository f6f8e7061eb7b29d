"""Rows for training: what is read, and whose rows are refused before a run starts.

Does not know features, losses or drafters.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chat import CHATML, THINKING, babbling_folder, byte_tokenizer
from paceline.data.fingerprint import Fingerprint, check_fingerprint, fingerprint_of, write_meta
from paceline.data.source import fingerprint_now
from paceline.train.corpus import check_corpus, read_corpus

ROW = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(babbling_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return path


def stamp(path: Path, target: Path, **facts: Any) -> None:
    write_meta(path, fingerprint_now(str(target)), {"target": "first", **facts})


def changed(target: Path, folder: Path, **parts: Any) -> Path:
    """A copy of the target folder with another tokenizer, template or weights."""
    shutil.copytree(target, folder)
    if "weights" in parts:
        babbling_folder(folder, seed=parts["weights"])
    if "template" in parts:
        byte_tokenizer(parts["template"]).save_pretrained(folder)
    if "token" in parts:
        tokenizer = byte_tokenizer(CHATML)
        tokenizer.add_tokens([parts["token"]])
        tokenizer.save_pretrained(folder)
    return folder


def test_rows_of_this_target_and_rows_that_say_nothing_are_accepted(
    target: Path, rows: Path, tmp_path: Path
) -> None:
    check_corpus([rows], str(target))
    stamp(rows, target)
    check_corpus([rows], str(target))
    moved = shutil.copytree(target, tmp_path / "moved")
    check_corpus([rows], str(moved))


@pytest.mark.parametrize(
    "part, change",
    [
        ("weights", {"weights": 5}),
        ("template", {"template": THINKING}),
        ("tokenizer", {"token": "x1"}),
    ],
)
def test_a_stale_file_is_refused_with_its_name_the_part_and_the_fix(
    part: str, change: dict[str, Any], target: Path, rows: Path, tmp_path: Path
) -> None:
    stamp(rows, target)
    other = changed(target, tmp_path / "other", **change)
    with pytest.raises(ValueError, match=r"rows\.jsonl is stale") as raised:
        check_corpus([tmp_path / "no-sidecar.jsonl", rows], str(other))
    said = str(raised.value)
    assert f"{part} (then" in said and "'first'" in said and "write the rows anew" in said
    assert [name for name in ("weights", "template", "tokenizer") if f"{name} (" in said] == [part]


def test_rows_that_were_gzipped_later_keep_their_fingerprint(
    target: Path, rows: Path, tmp_path: Path
) -> None:
    stamp(rows, target)
    packed = Path(f"{rows}.gz")
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    other = changed(target, tmp_path / "other", template=THINKING)
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz is stale"):
        check_corpus([packed], str(other))


def test_replies_of_others_fit_every_fine_tune_of_one_tokenizer(
    target: Path, rows: Path, tmp_path: Path
) -> None:
    write_meta(rows, fingerprint_now(str(target)).without_weights(), {})
    check_corpus([rows], str(changed(target, tmp_path / "tuned", weights=5)))


def test_a_target_without_a_tokenizer_compares_its_weights(
    target: Path, rows: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    stamp(rows, target)
    check_corpus([rows], str(bare))
    babbling_folder(bare, seed=5)
    for file in bare.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="weights"):
        check_corpus([rows], str(bare))


def test_prompts_without_replies_are_refused_with_the_command(target: Path, rows: Path) -> None:
    stamp(rows, target, kind="self-write")
    with pytest.raises(ValueError, match=f"paceline data regenerate {rows}"):
        check_corpus([rows], str(target))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": {}}', '{"fingerprint": null}'])
def test_a_broken_sidecar_is_named(text: str, target: Path, rows: Path) -> None:
    Path(f"{rows}.meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.jsonl\.meta\.json: not a fingerprint"):
        check_corpus([rows], str(target))


def test_weights_differ_by_a_byte_in_the_middle_and_not_by_metadata(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    def weights(value: float, **metadata: str) -> str | None:
        tensor = torch.zeros(64, 64)
        tensor[32, 1] = value
        save_file({"w": tensor}, tmp_path / "model.safetensors", metadata=metadata)
        return fingerprint_of(str(tmp_path), None).weights

    first = weights(0.0, format="pt")
    assert first is not None and weights(0.0, note="other") == first != weights(0.5)
    assert fingerprint_of(str(tmp_path), None) == Fingerprint(
        weights=weights(0.5), tokenizer=None, template=None
    )


def test_a_part_that_one_side_does_not_know_is_not_compared(rows: Path) -> None:
    known = Fingerprint(weights="a", tokenizer="b", template="c")
    assert not check_fingerprint(rows, known)
    write_meta(rows, Fingerprint(weights=None, tokenizer="b", template="c"), {})
    assert check_fingerprint(rows, known)
    assert check_fingerprint(rows, Fingerprint(weights="x", tokenizer=None, template="c"))


def corpus(path: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_tokens": 64, "min_reply": 2, "held_out_share": 0.0}
    return read_corpus([path], **(options | changes))


@pytest.mark.parametrize(
    "line, why",
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[1]", "no prompt_ids"),
        (b'{"messages": []}', "no prompt_ids; conversations become rows by"),
        (b'{"prompt_ids": [1]}', "no response_ids"),
        (b'{"prompt_ids": "12", "response_ids": [1]}', "prompt_ids is not a list"),
        (b'{"prompt_ids": [1], "response_ids": [1.5]}', "response_ids is not a list"),
        (b'{"prompt_ids": [1], "response_ids": [-1]}', "response_ids is not a list"),
        (b'{"prompt_ids": [1], "response_ids": [2], "temperature": []}', "float"),
    ],
)
def test_a_row_that_is_none_names_file_and_line(line: bytes, why: str, rows: Path) -> None:
    rows.write_bytes(rows.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{why}"):
        corpus(rows)


def test_a_cut_gzip_file_is_named(rows: Path, tmp_path: Path) -> None:
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes() * 50)[:-12])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz: not a whole gzip file"):
        corpus(packed)


def test_long_rows_and_loops_are_cut_and_short_replies_left_out(rows: Path) -> None:
    loop = [7, 8, 9] * 30
    lines = [ROW, {**ROW, "response_ids": [3]}, {**ROW, "response_ids": list(range(200))}]
    lines.append({**ROW, "response_ids": [1, 2, *loop], "temperature": 0.6, "source": "s"})
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, long, cut = corpus(rows)
    assert whole.tokens.tolist() == [1, 2, 3, 4, 5, 6] and whole.start == 2 and whole.greedy
    assert len(long.tokens) == 64 and long.reply.tolist() == list(range(62))
    assert cut.reply.tolist() == [1, 2, 7, 8, 9]  # up to the second copy
    assert not cut.greedy and cut.source == "s"


def test_rows_of_one_conversation_are_held_out_together(tmp_path: Path) -> None:
    """A later row's context holds an earlier row's reply."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as stream:
        for i in range(200):
            for turn in range(3):
                ids = {"prompt_ids": [i, turn], "response_ids": [5, 6, 7, 8]}
                stream.write(json.dumps(ids | {"conversation": f"c{i}"}) + "\n")
    rows = read_corpus([path], max_tokens=9, min_reply=1, held_out_share=0.3)
    split = [row.held_out for row in rows]
    assert split[::3] == split[1::3] == split[2::3]
    assert 30 < sum(split[::3]) < 90
