"""A whole tiny run: capture, training, stop and resume by every means, several processes, export.

Does not know real models: the target is a random Llama of five layers.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafters.dflash import draft_to_target, load_dflash
from paceline.train.config import Phase, TrainConfig, parse_settings
from paceline.train.fit import fit, learning_rate
from paceline.train.order import Order
from tiny import tiny_model

STEPS = 20


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("train")
    model = tiny_model("llama", num_hidden_layers=5)
    model.save_pretrained(folder / "target")
    rng = random.Random(0)
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as stream:
        for i in range(40):
            row = {"source": "test", "prompt": str(i), "temperature": 0.0}
            row |= {"prompt_ids": [rng.randrange(97) for _ in range(5)]}
            row |= {"response_ids": [rng.randrange(97) for _ in range(rng.randint(6, 30))]}
            stream.write(json.dumps(row) + "\n")
    return TrainConfig(
        target=str(folder / "target"),
        data=(str(folder / "corpus.jsonl.gz"),),
        run_dir=str(folder / "run"),
        taps=(0, 2, 3),
        init_layers=(1, 3),
        phases=(
            Phase(share=0.5, block_size=2, anchors_per_row=4, words=30),
            Phase(share=0.5, block_size=4, anchors_per_row=2),
        ),
        mask_token_id=16,
        draft_vocab_size=60,
        block_size=4,
        rows_per_step=4,
        compute="fp32",
        steps=STEPS,
        held_out_share=0.2,
        rows_per_shard=8,
        eval_every=10,
    )


@pytest.fixture(scope="module")
def whole(setup: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of an uninterrupted run."""
    return finish(setup, tmp_path_factory.mktemp("whole"))


def test_dflare_trains_and_is_widened_by_a_flat_step(setup: TrainConfig, tmp_path: Path) -> None:
    """Both context parts learn, and the folder of one run is where the wider block begins."""
    parts: dict[str, Any] = {"fusion": "layerwise", "split_kv": True, "tap_norm": True}
    first = setup.replace(run_dir=str(tmp_path / "a"), gamma_step=0.5, **parts)
    drafter = fit(first, say=silent).drafter
    config, module, _ = load_dflash(drafter, torch.float32)
    assert config.layerwise_fusion and config.split_kv and config.tap_norm
    started = [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]  # the taps that feed layers 1 and 3
    logits = module.layer_fusion_weights.detach()
    assert not torch.equal(logits, torch.tensor(started)[:, : logits.shape[1]])
    for layer in module.layers:
        attention: Any = layer.self_attn
        assert not torch.equal(attention.k_proj_target.weight, attention.k_proj.weight)
    wide = Phase(share=1.0, block_size=7, anchors_per_row=2, widened_from=4)
    second = first.replace(
        run_dir=str(tmp_path / "b"), init_from=str(drafter), block_size=7, phases=(wide,)
    )
    assert load_dflash(fit(second, say=silent).drafter)[0].block_size == 7
    before = json.loads((tmp_path / "b" / "growth.json").read_text())
    for line in losses(tmp_path / "b"):
        if "growth" in line:
            found = line["growth"]
            assert found["rounds"] == sum(before) > 0 and len(found["erosion_by_slot"]) == 3
            won = found["new_slots_G"] - found["front_erosion_L"]
            assert won == pytest.approx(found["gain"])
            assert found["gain"] == pytest.approx(found["tau_wide"] - found["tau_short"])
    assert "growth" in line, "the last evaluation has it"
    assert not (tmp_path / "a" / "growth.json").exists()
    weights = drafter / "model.safetensors"
    state = load_file(weights)
    state["norm.weight"][0] = float("nan")
    save_file(state, weights, metadata={"format": "pt"})
    third = second.replace(run_dir=str(tmp_path / "c"), features_dir=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="norm.weight holds NaN"):
        fit(third, say=silent)
    weights.unlink()
    with pytest.raises(ValueError, match="no .safetensors file"):
        fit(third, say=silent)
    assert not (tmp_path / "none").exists(), "it is said before anything long"
    with pytest.raises(ValueError, match="longer than a text"):
        huge = Phase(share=1.0, block_size=10**8, anchors_per_row=2, widened_from=4)
        second.replace(block_size=10**8, phases=(huge,))


def silent(_: str) -> None:
    pass


def finish(config: TrainConfig, folder: Path) -> dict[str, Any]:
    outcome = fit(config.replace(run_dir=str(folder)), say=silent)
    assert outcome.finished and outcome.drafter == folder / "drafter"
    return read(folder)


def read(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["step"] == STEPS
    return state


def counts(state: dict[str, Any]) -> dict[str, float]:
    return {name: state["totals"][name] for name in ("blocks", "positions")}


def losses(folder: Path) -> list[Any]:
    """Every logged line, the clock's and the speed's figures left out."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    clock = {"total_seconds", "positions_per_second"}
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def same(one: Any, other: Any) -> None:
    """Bit-equal tensors, whatever holds them."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def launch(config: TrainConfig, folder: Path, ranks: int = 0) -> subprocess.Popen[str]:
    """`paceline`'s fit in processes of its own, by torchrun if there are several."""
    script = folder.parent / f"{folder.name}.py"
    script.write_text(
        "from paceline.train.config import Distil, Phase, TrainConfig\n"
        "from paceline.train.fit import fit\n"
        f"print(fit({config.replace(run_dir=str(folder))!r}).finished)\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [sys.executable, *(torchrun if ranks else []), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Sums depend on the number of threads; several processes share the cores.
        env=os.environ | {"OMP_NUM_THREADS": "1" if ranks else str(torch.get_num_threads())},
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_run_that_is_broken_off_and_resumed_is_bit_equal(
    setup: TrainConfig, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.train.fit as module

    real = module.train_step

    def break_off(config: Any, trainee: Any, rows: Any, step: int) -> dict[str, float]:
        if step == 13:  # in the middle of an epoch, of a phase and between evaluations
            raise RuntimeError("power cut")
        return real(config, trainee, rows, step)

    monkeypatch.setattr(module, "train_step", break_off)
    with pytest.raises(RuntimeError, match="power cut"):
        finish(setup.replace(checkpoint_seconds=0.0), tmp_path / "resumed")
    monkeypatch.setattr(module, "train_step", real)
    seen = []
    monkeypatch.setattr(module, "train_step", lambda *a: seen.append(a[3]) or real(*a))
    resumed = finish(setup, tmp_path / "resumed")
    assert seen == list(range(13, STEPS))
    same(whole["masters"], resumed["masters"])
    same(whole["optimizer"]["state"], resumed["optimizer"]["state"])
    assert counts(whole) == counts(resumed)


def test_twenty_steps_equal_ten_a_kill_and_ten(
    setup: TrainConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    process = launch(setup.replace(checkpoint_seconds=0.0), folder)
    wait_for(folder / "drafter", process)  # written at step 10, before that step's checkpoint
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert 9 <= state["step"] < STEPS
    resumed = finish(setup, folder)
    same(whole["masters"], resumed["masters"])
    same(whole["optimizer"]["state"], resumed["optimizer"]["state"])


def test_sigterm_saves_first(setup: TrainConfig, whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    long = setup.replace(steps=100_000, eval_every=100_000)
    process = launch(long, folder)
    wait_for(folder / "log.jsonl", process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "run again to resume" in out and "False" in out
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert 50 <= state["step"] < 100_000


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_equal_one(
    setup: TrainConfig, whole: dict[str, Any], tmp_path: Path, how: str
) -> None:
    """With micro-batches as well; rows that do not divide leave one process without any."""
    folder = tmp_path / how
    process = launch(setup.replace(parallel=how, micro_batches=3), folder, ranks=2)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    found = read(folder)
    assert counts(found) == counts(whole)
    for name, weight in whole["masters"].items():
        torch.testing.assert_close(found["masters"][name], weight, rtol=2e-3, atol=2e-5)
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == STEPS and last["served_rounds"] > 50
    resumed = fit(setup.replace(run_dir=str(folder)), say=silent)  # by one process
    assert resumed.finished


def test_micro_batches_and_recomputing_change_rounding_only(
    setup: TrainConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    changed = setup.replace(micro_batches=2, recompute=True)
    found = finish(changed, tmp_path / "micro")
    for name, weight in whole["masters"].items():
        torch.testing.assert_close(found["masters"][name], weight, rtol=2e-3, atol=2e-5)


def test_features_kept_captured_or_half_of_each_train_the_same(
    setup: TrainConfig, whole: dict[str, Any], tmp_path: Path
) -> None:
    for cache_gb in (0.0, 0.00012):
        folder = tmp_path / str(cache_gb)
        found = finish(setup.replace(cache_gb=cache_gb), folder)
        shards = len(list(folder.glob("features-corpus/*.safetensors")))
        assert shards == 0 if cache_gb == 0 else 0 < shards < 5
        for name, weight in whole["masters"].items():
            torch.testing.assert_close(found["masters"][name], weight, rtol=2e-2, atol=2e-4)


def test_bf16_computes_in_bf16_with_float32_masters(setup: TrainConfig, tmp_path: Path) -> None:
    found = finish(setup.replace(compute="bf16", recompute=True), tmp_path / "bf16")
    assert {weight.dtype for weight in found["masters"].values()} == {torch.float32}
    rounded = [torch.equal(w, w.bfloat16().float()) for w in found["masters"].values()]
    assert not any(rounded)


def test_a_run_leaves_logs_a_drafter_and_provenance_without_paths(
    setup: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    commit = "0" * 40
    monkeypatch.setattr("paceline.train.checkpoint.source_commit", lambda: commit)
    folder = tmp_path / "run"
    moved: list[tuple[str, int, int]] = []
    said: list[str] = []
    config = setup.replace(run_dir=str(folder))
    fit(config, say=said.append, progress=lambda *now: moved.append(now))
    assert any(what.startswith("capture") and done == total for what, done, total in moved)
    assert moved[-1][1:] == (STEPS, STEPS)
    assert sum("served-acceptance estimate" in line for line in said) == 2
    lines = losses(folder)
    assert [line["step"] for line in lines] == [10, STEPS, STEPS]
    assert lines[1]["total_blocks"] > 0 and lines[1]["lr"] < setup.lr
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [item.step for item in board.Scalars("served_estimate")] == [10, STEPS]
    drafter, _, d2t = load_dflash(folder / "drafter")
    assert d2t is not None and drafter.draft_vocab_size == 60 == len(draft_to_target(d2t))
    for path in (folder / "provenance.json", folder / "drafter" / "provenance.json"):
        found = json.loads(path.read_text())
        assert found["settings"]["lr"] == setup.lr and found["figures"]["step"] == STEPS
        assert found["data"][0]["name"] == "corpus.jsonl.gz" and found["data"][0]["rows"] == 40
        assert "/" not in json.dumps([found["settings"], found["data"]])
        assert os.uname().nodename not in path.read_text()
        assert found["commit"] == commit
    fit(config, say=silent)  # nothing left to do: nothing is logged twice
    assert losses(folder) == lines


def test_a_resumed_run_does_not_log_a_step_twice(setup: TrainConfig, tmp_path: Path) -> None:
    finish(setup, tmp_path)
    log = tmp_path / "log.jsonl"
    before = losses(tmp_path)
    with log.open("a") as stream:
        stream.write('{"step": 25, "loss": 1.0}\n{"step": 2')
    finish(setup, tmp_path)
    assert losses(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e-3}, "was made with lr="),
        ({"steps": 40}, "was made with steps=20, not 40"),
        ({"held_out_share": 0.3}, "held_out_share|another data"),
        ({"max_tokens": 20}, "max_tokens|other rows"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    setup: TrainConfig, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    finish(setup, tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=message):
        finish(setup.replace(**change), tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_a_damaged_checkpoint_is_named(setup: TrainConfig, tmp_path: Path) -> None:
    finish(setup, tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be read"):
        finish(setup, tmp_path)


def test_every_row_is_seen_once_an_epoch_and_orders_differ(setup: TrainConfig) -> None:
    class Item:
        def __init__(self, length: int) -> None:
            self.row = self
            self.tokens = [0] * length

    rows: Any = [Item(n) for n in range(10, 90)]
    epochs = [
        [item for step in range(at, at + 20) for item in Order(rows, 4, 0).batch(step)]
        for at in (0, 20)
    ]
    assert set(epochs[0]) == set(epochs[1]) == set(rows) and len(epochs[0]) == 80
    assert epochs[0] != epochs[1]
    assert len(Order(rows[:3], 4, 0).batch(7)) == 3


def test_settings_are_checked(setup: TrainConfig) -> None:
    assert setup.replace(**parse_settings(["steps=20", "lr=1e-3"])).steps == 20
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        setup.replace(gama=2)
    with pytest.raises(ValueError, match="sum to 1"):
        setup.replace(phases=setup.phases[:1])
    with pytest.raises(ValueError, match="compute is 'int8', not one of auto, bf16, fp32"):
        setup.replace(compute="int8")
    with pytest.raises(ValueError, match="cache_gb"):
        setup.replace(cache_gb=-1.0)
    rates = [learning_rate(setup.replace(steps=100), step) for step in range(100)]
    assert max(rates) == setup.lr and rates[-1] < 0.01 * setup.lr and rates[0] < setup.lr


@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_the_teacher_of_a_draft_is_the_targets_state_one_token_before(
    setup: TrainConfig, tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.train.fit as module
    from paceline.train import policy
    from paceline.train.capture import load_frozen

    model = load_frozen(setup.target, torch.float32)
    checked = 0

    def watch(config: Any, trainee: Any, rows: Any, blocks: Any, head: Any, given: Any) -> Any:
        real = policy.distance_rule

        def look(teacher: Any, head: Any, kind: str) -> Any:
            nonlocal checked
            teacher_RAkD = teacher.view(*blocks.labels_RAk.shape, -1)
            for r, item in enumerate(rows):
                tokens = torch.from_numpy(item.row.tokens).long()[None]
                states = model.get_decoder()(tokens).last_hidden_state[0]
                for a, anchor in enumerate(blocks.anchors_RA[r].tolist()):
                    for k in (blocks.labels_RAk[r, a] >= 0).nonzero().flatten().tolist():
                        expected = states[anchor + k]
                        torch.testing.assert_close(
                            teacher_RAkD[r, a, k], expected, rtol=0.02, atol=0.02
                        )
                        checked += 1
            return real(teacher, head, kind)

        with monkeypatch.context() as patch:
            patch.setattr(policy, "distance_rule", look)
            return inner(config, trainee, rows, blocks, head, given)

    inner = module.batch_loss
    monkeypatch.setattr(module, "batch_loss", watch)
    finish(setup.replace(loss=loss), tmp_path)
    assert checked > 300


def test_runs_share_features(setup: TrainConfig, whole: dict[str, Any], tmp_path: Path) -> None:
    shared = setup.replace(features_dir=str(tmp_path / "features"))
    first = finish(shared, tmp_path / "first")
    files = sorted((tmp_path / "features").rglob("*.safetensors"))
    written = [file.stat().st_mtime_ns for file in files]
    finish(shared.replace(seed=0, lr=1e-3), tmp_path / "second")
    assert files and [file.stat().st_mtime_ns for file in files] == written
    assert not list((tmp_path / "second").glob("features-*"))
    same(whole["masters"], first["masters"])


def test_text_of_another_target_is_refused(setup: TrainConfig, tmp_path: Path) -> None:
    from chat import CHATML, byte_tokenizer
    from paceline.data.rows import RowFile
    from paceline.data.source import open_template

    folder = tmp_path / "target"
    tiny_model("llama", num_hidden_layers=5, vocab_size=300).save_pretrained(folder)
    byte_tokenizer(CHATML).save_pretrained(folder)
    _template, fingerprint = open_template(str(folder), {})
    with RowFile(tmp_path / "rows.jsonl", fingerprint, {"kind": "tokenize"}) as rows:
        del rows
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        fit(setup.replace(data=(str(tmp_path / "rows.jsonl"),), run_dir=str(tmp_path / "run")))


def test_tokens_that_the_target_lacks_are_named(setup: TrainConfig, tmp_path: Path) -> None:
    data = tmp_path / "wide.jsonl"
    row = {"prompt_ids": [1, 2], "response_ids": [5, 97, 6, 7], "temperature": 0.0}
    data.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"wide\.jsonl has token 97, the target 97"):
        fit(setup.replace(data=(str(data),), run_dir=str(tmp_path / "run")), say=silent)
