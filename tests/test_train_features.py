"""Features of the frozen target: what they equal, how they are stored, and what is refused.

Does not know drafters or the training loop.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core import Draft
from paceline.train import features, shards
from paceline.train.corpus import Row
from paceline.train.features import (
    FeatureRow,
    Taps,
    load_frozen,
    open_features,
    plan_cache,
    stack_features,
    target_fingerprint,
)
from tiny import plain_row, tiny_model, tiny_target

TAPS = (2, 0, 3)  # features lie in this order
WIDTH = 3 * 32
PER_SHARD = 8
ULP = 2.0**-7  # the relative step of bf16 just above a power of two: rounding another way
FOUND = list[dict[str, float]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=5)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows(20)


@pytest.fixture(scope="module")
def whole(model: Any, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete cache, captured without interruption. Tests must not change it."""
    folder = tmp_path_factory.mktemp("whole")
    open_rows(rows, folder, model)
    return folder


def make_rows(count: int, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 97, size).astype(np.int32) for size in rng.integers(3, 60, count)]
    how: dict[str, Any] = {"start": 1, "source": "", "temperature": 0.0, "held_out": False}
    return [Row(tokens=tokens, **how) for tokens in texts]


def open_rows(rows: list[Row], folder: Path, model: Any, **changes: Any) -> list[FeatureRow]:
    how: dict[str, Any] = {"layer_ids": TAPS, "rows_per_shard": PER_SHARD, "limit_gb": None}
    return open_features(rows, folder, model, **how | changes)


def contents(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, hidden files too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hidden_states(model: Any, tokens: Any, taps: tuple[int, ...] = TAPS) -> Tensor:
    """[S, F] from the model's own plain forward of the row alone."""
    ids = torch.from_numpy(tokens).long()[None]
    states = model(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1][0] for i in taps], dim=-1)


def close_bf16(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=ULP, atol=1e-4)


@contextmanager
def counted(module: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the inputs of a module while the block runs."""
    calls: list[tuple[int, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape))
    try:
        yield calls
    finally:
        hook.remove()


def forked(target: Callable[..., None], *arguments: Any) -> Any:
    """A started copy of this process: no import, the same model."""

    def run() -> None:
        torch.set_num_threads(1)  # a fork has none of its parent's worker threads
        target(*arguments)

    process: Any = multiprocessing.get_context("fork").Process(target=run)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork
        process.start()
    return process


def exit_code(process: Any) -> int | None:
    process.join(60)
    if process.is_alive():
        process.kill()
        raise AssertionError("the process hangs")
    code: int | None = process.exitcode
    return code


# What features are


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt-oss"])  # plain; windows, scaling; sinks
def test_features_are_the_hidden_states_of_the_plain_model(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, rows = tiny_model(kind, num_hidden_layers=5).to(dtype), make_rows(6)
    found = open_rows(rows, tmp_path, model, batch_tokens=1)  # each row in a forward of its own
    for item, row in zip(found, rows, strict=True):
        padded = np.zeros(-(-len(row.tokens) // 32) * 32, np.int32)
        padded[: len(row.tokens)] = row.tokens
        same_shape = hidden_states(model, padded)[: len(row.tokens)]
        assert torch.equal(item.tensor(), same_shape.bfloat16())
        if dtype == torch.float32:
            taps = Taps(model, TAPS).run_rows([row.tokens])[0, : len(row.tokens)]
            torch.testing.assert_close(taps, hidden_states(model, row.tokens), rtol=1e-4, atol=1e-5)
        else:
            alone = hidden_states(model, row.tokens)
            error = (item.tensor().float() - alone.float()).norm() / alone.float().norm()
            assert error < 0.03
        assert item.width == WIDTH and item.row is row


def test_features_are_what_decoding_taps() -> None:
    target, row = tiny_target("qwen3"), make_rows(1)[0]
    tokens = row.tokens.tolist()
    decoded = target.score(
        Draft.empty(1), [plain_row(0, tokens)], target.new_cache(1), (1, 0)
    ).taps_TF
    assert decoded is not None
    captured = Taps(target.model, (1, 0)).run_rows([row.tokens])[0, : len(tokens)]
    torch.testing.assert_close(captured, decoded, rtol=1e-4, atol=1e-5)


def test_a_batch_gives_what_its_rows_give_alone(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    taps = Taps(model, TAPS)
    batch = taps.run_rows([row.tokens for row in rows])
    for row, found in zip(rows, batch, strict=True):
        alone = taps.run_rows([row.tokens])[0, : len(row.tokens)]
        torch.testing.assert_close(found[: len(row.tokens)], alone, rtol=1e-4, atol=1e-5)
    with counted(model.get_input_embeddings()) as calls:
        one_by_one = open_rows(rows, tmp_path, model, batch_tokens=1)
    assert len(calls) == len(rows)
    for item, batched in zip(one_by_one, open_rows(rows, whole, model), strict=True):
        close_bf16(item.tensor(), batched.tensor())


def test_batches_hold_about_batch_tokens(model: Any, rows: list[Row], tmp_path: Path) -> None:
    with counted(model.get_input_embeddings()) as calls:
        open_rows(rows, tmp_path, model, batch_tokens=256)
    assert len(calls) < len(rows)
    assert all(B * S <= 256 and S % 32 == 0 for B, S in calls)


def test_the_model_stays_as_it_is_and_runs_no_layer_above_the_taps(model: Any) -> None:
    tokens = make_rows(1)[0].tokens
    before = hidden_states(model, tokens)  # transformers keeps hooks of its own for this
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with counted(model.model.layers[3]) as last, counted(model.model.layers[4]) as above:
        Taps(model, TAPS).run_rows([tokens])
    assert len(last) == 1 and not above
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.equal(hidden_states(model, tokens), before)


def test_taps_that_the_target_does_not_have(model: Any) -> None:
    for layer in (4, -2):  # the last layer's states are kept behind the final norm only
        with pytest.raises(ValueError, match=rf"tap {layer}: the target has layers 0\.\.3"):
            Taps(model, (0, layer))
    with pytest.raises(ValueError, match="at least one layer"):
        Taps(model, ())


# How they are stored


def test_a_shard_holds_tokens_beside_states(model: Any, rows: list[Row], whole: Path) -> None:
    assert sorted(contents(whole)) == [f"shard-0000{n}.safetensors" for n in range(3)]
    for number in range(3):
        part = rows[number * PER_SHARD : (number + 1) * PER_SHARD]
        path = whole / f"shard-0000{number}.safetensors"
        stored = load_file(path)
        assert stored["tokens"].tolist() == [t for row in part for t in row.tokens.tolist()]
        offsets = stored["offsets"].tolist()
        assert offsets == [0, *np.cumsum([len(row.tokens) for row in part])]
        for i, row in enumerate(part):
            found = stored["features"][offsets[i] : offsets[i + 1]]
            close_bf16(found, hidden_states(model, row.tokens).bfloat16())
        plan = plan_cache(part, width=WIDTH, rows_per_shard=PER_SHARD, limit_gb=None)
        assert plan.bytes - 1024 < path.stat().st_size <= plan.bytes
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["paceline"])["taps"] == list(TAPS)


def test_rows_are_read_as_copies_and_cut(model: Any, rows: list[Row], whole: Path) -> None:
    item = open_rows(rows, whole, model)[11]
    kept = item.tensor()
    assert kept.shape == (len(rows[11].tokens), WIDTH) and kept.dtype == torch.bfloat16
    assert torch.equal(item.tensor(2), kept[:2]) and torch.equal(item.tensor(10**6), kept)
    item.tensor().zero_()
    assert kept.any() and torch.equal(item.tensor(), kept)
    in_memory = FeatureRow(item.row, kept.view(torch.uint16).numpy())
    assert torch.equal(in_memory.tensor(2), kept[:2]) and in_memory.width == WIDTH


def test_the_report_says_what_is_done_and_left(model: Any, rows: list[Row], tmp_path: Path) -> None:
    reports: FOUND = []
    open_rows(rows, tmp_path, model, report=reports.append)
    tokens = sum(len(row.tokens) for row in rows)
    plan = plan_cache(rows, width=WIDTH, rows_per_shard=PER_SHARD, limit_gb=None)
    sizes = {"rows": 20, "online_rows": 0, "tokens": tokens, "bytes": plan.bytes}
    assert reports[0] == sizes | {"shards": 3, "missing": 3}
    assert [(r["shard"], r["shards"]) for r in reports[1:]] == [(1, 3), (2, 3), (3, 3)]
    assert reports[-1]["tokens"] == tokens and reports[-1]["seconds_left"] == 0
    again: FOUND = []
    with counted(model.get_input_embeddings()) as calls:
        open_rows(rows, tmp_path, model, report=again.append)
    assert not calls and again == [reports[0] | {"missing": 0}]


# Interrupted, full, shared


def killed_while_writing(folder: Path, rows: list[Row], model: Any) -> None:
    """Capture until the second shard is half written, then die at once."""

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata=metadata)
        if "shard-00001" in path.name:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    shards.save_file = half
    open_rows(rows, folder, model)


def killed_before_publishing(folder: Path, rows: list[Row], model: Any) -> None:
    """Capture until the second shard is written but does not have its name, then die at once."""
    publish = os.replace

    def die(work: Path, path: Path) -> None:
        if "shard-00001" in path.name:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(work, path)

    os.replace = die  # type: ignore[assignment]
    open_rows(rows, folder, model)


@pytest.mark.parametrize("killed", [killed_while_writing, killed_before_publishing])
def test_a_killed_capture_leaves_nothing_half_and_resumes(
    killed: Callable[..., None], model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    assert exit_code(forked(killed, folder, rows, model)) == -signal.SIGKILL
    left = contents(folder)
    visible = {name: data for name, data in left.items() if not name.startswith(".")}
    assert len(left) == 2  # the test is about an unfinished file, so there must be one
    first = "shard-00000.safetensors"
    assert visible == {first: contents(whole)[first]}
    reports: FOUND = []
    open_rows(rows, folder, model, report=reports.append)
    assert reports[0]["missing"] == 2
    assert contents(folder) == contents(whole)


def test_a_full_disk_names_the_file_and_leaves_nothing_half(
    model: Any, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors.*No space left.*cache_gb"):
        open_rows(rows, tmp_path, model)
    assert contents(tmp_path) == {}


def test_a_second_capture_into_the_folder_is_told(
    model: Any, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = os.replace

    def taken_away(work: Path, path: Path) -> None:
        for unfinished in tmp_path.glob(".*"):  # as another capture does when it begins a shard
            unfinished.unlink()
        publish(work, path)

    monkeypatch.setattr(os, "replace", taken_away)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: another process"):
        open_rows(rows, tmp_path, model)


def too_little_space(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: list[Row], model: Any, free: int
) -> float:
    """Pretend that so many bytes are free; returns the limit that the refusal proposes."""
    usage = shutil._ntuple_diskusage(10**9, 10**9 - free, free)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ValueError, match=rf"{folder}.*GB free; set cache_gb=") as caught:
        open_rows(rows, folder, model)
    proposed = re.search(r"cache_gb=([\d.]+)", str(caught.value))
    assert proposed
    return float(proposed[1])


def test_too_little_disk_space_is_refused_first(
    model: Any, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_GB", 1e3)  # a limit that the message can print
    sizes = [
        plan_cache(rows[at : at + 8], width=WIDTH, rows_per_shard=8, limit_gb=None).bytes
        for at in (0, 8, 16)
    ]
    folder = tmp_path / "not" / "there" / "yet"
    free = int((sizes[0] + sizes[1]) / 0.9) + 20
    assert free < sum(sizes)
    proposed = too_little_space(monkeypatch, folder, rows, model, free)
    assert not (tmp_path / "not").exists()
    assert proposed * 1e3 == pytest.approx(0.9 * free, abs=5)
    open_rows(rows, folder, model, limit_gb=proposed)
    assert len(contents(folder)) == 2
    # What is there already needs no room.
    free = sizes[2] - 1
    proposed = too_little_space(monkeypatch, folder, rows, model, free)
    assert proposed * 1e3 == pytest.approx(sizes[0] + sizes[1] + 0.9 * free, abs=5)
    monkeypatch.undo()
    assert len(open_rows(rows, folder, model)) == 20 and len(contents(folder)) == 3


def rank_captures(
    rank: int, store: Path, folders: list[Path], rows: list[Row], model: Any, out: Path
) -> None:
    """One of two ranks; writes what it reported, or the refusal it got."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    reports: FOUND = []
    time.sleep(0.3 * rank)  # the other rank must not write before this one has looked
    try:
        found = open_rows(rows, folders[rank], model, report=reports.append)
        sums = [float(item.tensor().float().sum()) for item in found]
        out.write_text(json.dumps({"reports": reports, "sums": sums}))
    except ValueError as error:
        out.write_text(json.dumps({"refused": str(error)}))
    dist.destroy_process_group()


def two_ranks(folders: list[Path], rows: list[Row], model: Any, work: Path) -> list[Any]:
    outs = [work / f"rank-{rank}.json" for rank in range(2)]
    shared = (work / "store", folders, rows, model)
    ranks = [forked(rank_captures, rank, *shared, outs[rank]) for rank in range(2)]
    assert [exit_code(process) for process in ranks] == [0, 0]
    return [json.loads(out.read_text()) for out in outs]


def test_two_ranks_capture_together_what_one_captures(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    said = two_ranks([folder, folder], rows, model, tmp_path)
    assert contents(folder) == contents(whole)
    assert [[r["shards"] for r in rank["reports"][1:]] for rank in said] == [[2, 2], [1]]
    assert said[0]["sums"] == said[1]["sums"] and len(said[0]["sums"]) == 20


def test_ranks_that_do_not_share_the_folder_are_told(
    model: Any, rows: list[Row], tmp_path: Path
) -> None:
    said = two_ranks([tmp_path / "a", tmp_path / "b"], rows, model, tmp_path)
    for rank, number in enumerate((1, 0)):
        assert f"shard-0000{number}.safetensors is not there" in said[rank]["refused"]
        assert "share that folder" in said[rank]["refused"]


# Damaged or foreign files


def copied(whole: Path, folder: Path) -> Path:
    """A copy to spoil; returns the path of its middle shard."""
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    return folder / "shard-00001.safetensors"


def flip(path: Path, tensor: str) -> None:
    """Change one bit in the middle of a tensor's bytes."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + size])[tensor]["data_offsets"]
    data[8 + size + (begin + end) // 2] ^= 1
    path.write_bytes(data)


def refused(path: Path, what: str) -> Any:
    return pytest.raises(ValueError, match=rf"(?s){re.escape(str(path))} {what}")


@pytest.mark.parametrize("tensor", ["tokens", "offsets"])
def test_a_flipped_bit_is_refused_when_opened(
    tensor: str, model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    path = copied(whole, tmp_path)
    flip(path, tensor)
    with refused(path, f"is damaged: `{tensor}`.*delete that file"):
        open_rows(rows, tmp_path, model)
    path.unlink()  # the advice
    open_rows(rows, tmp_path, model)
    assert contents(tmp_path) == contents(whole)


def test_a_flipped_bit_of_the_states_is_refused_when_first_read(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    path = copied(whole, tmp_path)
    flip(path, "features")
    found = open_rows(rows, tmp_path, model)
    found[0].tensor(), found[16].tensor()  # of other shards
    with refused(path, "is damaged: `features`.*delete that file"):
        found[15].tensor(1)  # the flipped bit need not be in the row
    with refused(path, "is damaged: `features`"):
        stack_features([found[0], found[9]], 16)


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.001, 0.0])
def test_a_file_cut_short_is_refused(
    kept: float, model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    path = copied(whole, tmp_path)
    os.truncate(path, int(kept * path.stat().st_size))
    with refused(path, "is cut short or damaged.*delete that file"):
        open_rows(rows, tmp_path, model)


def test_a_file_that_is_no_shard_is_refused(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    path = copied(whole, tmp_path)
    stored = load_file(path)
    for metadata in (None, {"paceline": '{"schema": "paceline-features-0"}'}):
        save_file(stored, path, metadata=metadata)
        with refused(path, "is not a feature shard of schema paceline-features-1"):
            open_rows(rows, tmp_path, model)
    save_file(stored, path, metadata={"paceline": "{"})
    with refused(path, "is cut short or damaged"):
        open_rows(rows, tmp_path, model)


def test_features_of_other_rows_or_taps_are_refused(
    model: Any, rows: list[Row], whole: Path
) -> None:
    first, last = whole / "shard-00000.safetensors", whole / "shard-00002.safetensors"
    anew = "delete the folder .* or use another run_dir"
    with refused(first, f"was captured from other rows.*{anew}"):
        open_rows([rows[1], rows[0], *rows[2:]], whole, model)
    with refused(last, f"was captured from other rows.*{anew}"):
        open_rows(rows[:-1], whole, model)
    with refused(first, f"was captured from other rows.*rows_per_shard.*{anew}"):
        open_rows(rows, whole, model, rows_per_shard=10)
    with refused(first, f"was captured from other taps.*{anew}"):
        open_rows(rows, whole, model, layer_ids=sorted(TAPS))
    assert len(contents(whole)) == 3


def test_features_of_another_target_are_refused(rows: list[Row], whole: Path) -> None:
    tuned = tiny_model("llama", num_hidden_layers=5)
    tuned.model.layers[1].self_attn.v_proj.weight[8:] += 1e-3  # no norm, no embedding, not all
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    stretched = tiny_model("llama", num_hidden_layers=5, rope_parameters=rope)
    for other in (tuned, stretched):
        with refused(whole / "shard-00000.safetensors", "was captured from another target"):
            open_rows(rows, whole, other)


def test_a_targets_fingerprint_does_not_depend_on_its_dtype() -> None:
    rounded = tiny_model("llama").bfloat16()
    expected = target_fingerprint(rounded)
    assert target_fingerprint(rounded.float()) == expected
    assert target_fingerprint(tiny_model("llama", seed=1)) != expected


# The limit


def test_the_first_shards_are_cached_and_the_rest_is_captured_when_needed(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    two = plan_cache(rows[:16], width=WIDTH, rows_per_shard=8, limit_gb=None).bytes
    plan = plan_cache(rows, width=WIDTH, rows_per_shard=8, limit_gb=(two + 1) / 1e9)
    assert (plan.shards, plan.rows, plan.bytes) == (2, 16, two)
    assert plan.tokens == sum(len(row.tokens) for row in rows[:16])
    assert plan_cache(rows, width=WIDTH, rows_per_shard=8, limit_gb=(two - 1) / 1e9).shards == 1
    reports: FOUND = []
    mixed = open_rows(rows, tmp_path, model, limit_gb=(two + 1) / 1e9, report=reports.append)
    assert reports[0]["online_rows"] == 4 and reports[0]["missing"] == 2
    expected = {name: data for name, data in contents(whole).items() if "00002" not in name}
    assert contents(tmp_path) == expected and sum(map(len, expected.values())) <= two
    assert [item.row for item in mixed] == rows

    cached = open_rows(rows, whole, model)
    chosen = [17, 3, 19, 9, 16]
    longest = max(len(rows[i].tokens) for i in chosen)
    for width in (7, longest, 64):
        with counted(model.get_input_embeddings()) as calls:
            found = stack_features([mixed[i] for i in chosen], width)
        assert len(calls) == 1 and calls[0][0] == 3  # the online rows in one forward
        close_bf16(found, stack_features([cached[i] for i in chosen], width))
        for r, i in enumerate(chosen):
            size = min(width, len(rows[i].tokens))
            assert not found[r, size:].any() and found[r, :size].any(dim=-1).all()
            close_bf16(found[r, :size], cached[i].tensor(width))
    close_bf16(mixed[18].tensor(5), cached[18].tensor(5))
    close_bf16(mixed[18].tensor(), cached[18].tensor())
    assert mixed[18].width == mixed[0].width == WIDTH


def test_limit_zero_writes_nothing(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    online = open_rows(rows, folder, model, limit_gb=0.0)
    assert not folder.exists()
    stacked = stack_features(open_rows(rows, whole, model), 64)
    close_bf16(stack_features(online, 64), stacked)


def test_shards_beyond_a_lower_limit_are_refused(
    model: Any, rows: list[Row], whole: Path, tmp_path: Path
) -> None:
    surplus = copied(whole, tmp_path)
    one = (plan_cache(rows[:8], width=WIDTH, rows_per_shard=8, limit_gb=None).bytes + 1) / 1e9
    with pytest.raises(ValueError, match=rf"{surplus}: this run caches 1 shards, and 2 more"):
        open_rows(rows, tmp_path, model, limit_gb=one)
    assert contents(tmp_path) == contents(whole)  # hours of capture are not ours to delete
    for path in sorted(tmp_path.iterdir())[1:]:
        path.unlink()
    assert len(open_rows(rows, tmp_path, model, limit_gb=one)) == 20


# The target itself


def test_a_target_without_all_its_weights_is_refused(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = load_frozen(str(tmp_path), torch.float32)
    assert target_fingerprint(loaded) == target_fingerprint(model)
    assert not loaded.training and not any(w.requires_grad for w in loaded.parameters())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    gone = "model.layers.1.mlp.up_proj.weight"
    kept = {name: weight for name, weight in weights.items() if name != gone}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(gone)):
        load_frozen(str(tmp_path))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match="damaged weights"):
        load_frozen(str(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss"])
def test_last_states_from_a_tap_are_the_decoders_own(kind: str) -> None:
    from paceline.train.capture import LastStates

    target = tiny_model(kind, num_hidden_layers=4)
    tokens = torch.randint(0, 97, (3, 19), generator=torch.Generator().manual_seed(0))
    want = target.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    for after in (0, 2):
        states = Taps(target, (after,)).run(tokens)
        assert torch.equal(LastStates(target, after).run(states), want)
    names = [type(layer).__name__ for layer in target.get_decoder().layers]
    assert len(set(names)) == 1 and len(names) == 4  # the model is as it was


def test_a_target_whose_layers_cannot_be_left_out_is_refused() -> None:
    from paceline.train.capture import LastStates

    target = tiny_model("llama", num_hidden_layers=4)
    decoder = target.get_decoder()
    inner = decoder.embed_tokens.forward
    decoder.norm.register_forward_hook(lambda _m, _i, out: out + inner(torch.tensor([seen[-1]])))
    seen: list[int] = []
    decoder.embed_tokens.register_forward_hook(lambda _m, i, _o: seen.append(int(i[0].max())))
    with pytest.raises(ValueError, match="cannot be left out"):
        LastStates(target, 2)
