"""Tiny runs that train on rollouts: each loss, replay, both modes, and kills at random moments.

Does not know real models: the target is a random Llama of four layers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.dflash import load_dflash
from paceline.target import Target
from paceline.train import fit as fit_module
from paceline.train import on_policy, policy
from paceline.train.capture import load_frozen, target_fingerprint
from paceline.train.config import Distil, OnPolicy, Phase, TrainConfig, parse_settings
from paceline.train.fit import fit
from paceline.train.objectives import best_drafts, previous_ids
from paceline.train.on_policy import record_origin, records_folder, serve_rollouts, versions_folder
from paceline.train.policy import judged_teacher, supervise
from paceline.train.records import RecordReader
from paceline.train.rounds import recorded_blocks
from paceline.train.sources import RolloutSource
from paceline.train.trainee import Head, row_of
from paceline.train.versions import Versions
from paceline.train.worker import roll_out_for
from tiny import tiny_model

V, D = 97, 32
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny target's folder and rows whose prompts are rolled out."""
    folder = tmp_path_factory.mktemp("on-policy")
    tiny_model("llama", num_hidden_layers=4, hidden_size=D).save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as stream:
        for _ in range(24):
            row = {"prompt_ids": rng.integers(1, V, 5).tolist(), "source": "x"}
            row["response_ids"] = rng.integers(1, V, 20).tolist()
            stream.write(json.dumps(row) + "\n")
    return str(folder / "target"), str(folder / "rows.jsonl")


def setting(corpus: tuple[str, str], run: Path, **changes: Any) -> TrainConfig:
    base = TrainConfig(
        target=corpus[0],
        data=(corpus[1],),
        run_dir=str(run),
        taps=(0, 2),
        layers=1,
        mask_token_id=0,
        block_size=4,
        phases=(Phase(share=1.0, block_size=4, anchors_per_row=6),),
        steps=STEPS,
        rows_per_step=3,
        compute="fp32",
        held_out_share=0.2,
        eval_every=STEPS,
        eval_rows=4,
        draft_vocab_size=80,
        lr=5e-3,
        on_policy=OnPolicy(
            reply_tokens=16, slots=4, records_per_shard=4, publish_every=4, max_ahead=12
        ),
    )
    return base.replace(**changes)


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def drafter(corpus: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter of which some drafts are accepted."""
    run = tmp_path_factory.mktemp("drafter")
    return str(fit(setting(corpus, run, loss="kl", steps=40, lr=1e-2), say=silent).drafter)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def totals(run: Path) -> dict[str, float]:
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    found: dict[str, float] = state["totals"]
    return found


LOSSES = {
    "ce": "drawn",
    "kl": "drawn",
    "adaflash": "drawn",
    "draft_opd": "recorded",
    "draft_opd_code": "recorded",
}


@pytest.mark.parametrize(
    ("loss", "compute"),
    [(loss, "fp32") for loss in LOSSES] + [("adaflash", "bf16"), ("draft_opd", "bf16")],
)
def test_each_loss_trains_on_rollouts(
    corpus: tuple[str, str], tmp_path: Path, loss: str, compute: str
) -> None:
    base = setting(corpus, tmp_path / "run")
    assert base.on_policy is not None
    how = replace(base.on_policy, anchors=LOSSES[loss], temperature=1.0)
    outcome = fit(base.replace(loss=loss, on_policy=how, compute=compute), say=silent)
    assert outcome.finished
    figures = totals(tmp_path / "run")
    assert figures["records"] == STEPS * 3 and figures["stale"] == 0 and figures["positions"] > 50
    _, module, _ = load_dflash(outcome.drafter, torch.float32)
    assert all(weight.isfinite().all() for weight in module.state_dict().values())
    last = log_of(tmp_path / "run")[-2]
    assert ("clip_ratio" in last) == (loss == "adaflash")
    assert not list(records_folder(tmp_path / "run").glob("shard-*")), "covered by the checkpoint"
    assert len(list(versions_folder(tmp_path / "run").glob("v*"))) == 3
    cached = [path.name for path in (tmp_path / "run").glob("features-*")]
    assert cached == ["features-rows-held-out"], "records bring their own features"


def test_replay_lowers_the_loss_of_what_was_recorded(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    base = setting(corpus, tmp_path / "first", steps=4)
    assert base.on_policy is not None
    fit(base.replace(on_policy=replace(base.on_policy, keep_records=True)), say=silent)
    records = str(records_folder(tmp_path / "first"))
    for loss, anchors in (("draft_opd", "recorded"), ("draft_opd", "shuffled"), ("ce", "drawn")):
        how = OnPolicy(source="replay", replay_from=records, anchors=anchors)
        run = tmp_path / f"{loss}-{anchors}"
        config = setting(corpus, run, loss=loss, on_policy=how, steps=50, eval_every=50)
        fit(config.replace(steps=1, run_dir=str(run) + "-1", lr=1e-9), say=silent)
        fit(config, say=silent)
        before, after = log_of(Path(str(run) + "-1"))[0]["loss"], log_of(run)[0]["loss"]
        assert after < 0.8 * before
    assert len(list(records_folder(tmp_path / "first").glob("shard-*"))) == 3, "nothing is deleted"
    text = (tmp_path / "ce-drawn" / "provenance.json").read_text()
    assert str(tmp_path) not in text and '"replay_from": "records"' in text
    other = OnPolicy(source="replay", replay_from=records)
    with pytest.raises(ValueError, match="taps"):
        fit(setting(corpus, tmp_path / "b", on_policy=other, taps=(1, 2)), say=silent)
    nothing = OnPolicy(source="replay", replay_from=str(tmp_path))
    with pytest.raises(ValueError, match="holds no records"):
        fit(setting(corpus, tmp_path / "c", on_policy=nothing), say=silent)


def test_a_stopped_run_resumes_where_its_records_are(
    corpus: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of the steps before and behind a stop follow one another, without gap or repeat."""
    seen: list[int] = []
    read = RecordReader.read

    def note(self: RecordReader, number: int) -> Any:
        seen.append(number)
        return read(self, number)

    monkeypatch.setattr(RecordReader, "read", note)
    config = setting(corpus, tmp_path, checkpoint_seconds=0.0)
    real, calls = RolloutSource.batch, []

    def batch(self: RolloutSource, step: int) -> Any:
        calls.append(step)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutSource, "batch", batch)
        with pytest.raises(KeyboardInterrupt):
            fit(config, say=silent)
    assert fit(config, say=silent).finished
    assert seen == list(range(STEPS * 3))
    assert totals(tmp_path)["records"] == STEPS * 3


def test_old_records_are_left_out_and_counted(corpus: tuple[str, str], tmp_path: Path) -> None:
    """One shard of 8 lasts for several steps; with every step a new version, its rest grows old."""
    how = OnPolicy(
        reply_tokens=8, slots=8, records_per_shard=8, publish_every=1, max_ahead=16, max_stale=0
    )
    config = setting(corpus, tmp_path, on_policy=how, rows_per_step=3, steps=5)
    published: list[int] = []
    begin = on_policy._Here.begin
    with pytest.MonkeyPatch.context() as patch:

        def publish(self: Any, step: int) -> None:
            begin(self, step)
            self._publisher.publish_due(step)
            published.append(self._publisher.newest())

        patch.setattr(on_policy._Here, "begin", publish)
        fit(config, say=silent)
    assert published == [0, 1, 2, 3, 4]
    figures = totals(tmp_path)
    # Of each shard 3 are trained, and the 5 others are a version too old for the next step.
    assert figures["records"] == 15 and figures["stale"] == 4 * 5


# --- supervision --------------------------------------------------------------------------------


def head_of(words: list[int]) -> Head:
    return Head(
        torch.randn(len(words), D), row_of(torch.tensor(words), V + 40), torch.tensor(words)
    )


def test_draft_opd_weighs_two_means_and_its_code_pools_tokens(corpus: tuple[str, str]) -> None:
    from test_policy_losses import reply

    blocks, rounds = recorded_blocks(
        [reply(), reply()], block_size=5, anchors=9, limit=99, seeds=[(0,), (1,)]
    )
    policy_ = OnPolicy(anchors="recorded")
    published = setting(corpus, Path("x"), loss="draft_opd", on_policy=policy_)
    given = supervise(published, head_of(list(range(114))), blocks, rounds)
    assert given.rejected_RAk is not None
    assert float(given.weights_RAk.sum()) == pytest.approx(0.5)
    assert float(given.rejected_RAk.sum()) == pytest.approx(0.5)
    torch.testing.assert_close(given.weights_RAk, rounds.accepted_RAk * 0.5 / 14)
    line = given.rejected_RAk[0, 0]  # offsets 3 and 4 were rejected: 0.8^2 and 0.8^3
    assert not line[:2].any() and float(line[3] / line[2]) == pytest.approx(0.8)
    whole = 2 * (0.8**2 + 0.8**3 + 1 + 0.8 + 0.8**2)
    assert float(line[2]) == pytest.approx(0.5 * 0.8**2 / whole)
    tilted = published.replace(distil=Distil(accepted=3.0, rejected=1.0, decay=1.0))
    other = supervise(tilted, head_of(list(range(114))), blocks, rounds)
    assert other.rejected_RAk is not None
    assert float(other.weights_RAk.sum()) == pytest.approx(0.75)
    assert float(other.rejected_RAk[0, 0, 2]) == pytest.approx(0.25 / 10)
    coded = published.replace(loss="draft_opd_code")
    pooled = supervise(coded, head_of(list(range(114))), blocks, rounds)
    assert pooled.rejected_RAk is not None
    assert float(pooled.total_RAk.sum()) == pytest.approx(1.0)
    count = 2 * (7 + 2)  # accepted and corrections
    assert float(pooled.weights_RAk.max()) == pytest.approx(1 / (count + whole))
    both = (pooled.weights_RAk > 0) & (pooled.rejected_RAk > 0)
    assert torch.equal(both, rounds.corrected_RAk), "the correction's slot has both"
    few = supervise(coded, head_of([104, 105, 7]), blocks, rounds)
    assert few.rejected_RAk is not None
    assert (few.weights_RAk > 0).sum() == 4, "words that the head lacks are no labels"
    assert (few.rejected_RAk > 0).sum() == 2
    part = given.take([1])
    assert part.rounds is not None and part.rounds.accepted_RAk.shape[0] == 1
    assert not given.take([0], weigh=False).total_RAk.any()


@pytest.mark.parametrize("anchors", ["recorded", "shuffled"])
def test_the_teacher_of_judged_drafts_knows_their_own_prefix(
    corpus: tuple[str, str],
    drafter: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    anchors: str,
) -> None:
    """Inside a real run: the law behind every weighted slot is that of a plain forward."""
    model, checked = load_frozen(corpus[0], torch.float32), [0, 0]
    target = Target(model)

    def look(trainee: Any, rows: Any, blocks: Any, rounds: Any) -> torch.Tensor:
        states = judged_teacher(trainee, rows, blocks, rounds)
        states_RAkD = states.view(*blocks.labels_RAk.shape, -1)
        for r, item in enumerate(rows):
            tokens = item.row.tokens.tolist()
            for a, anchor in enumerate(blocks.anchors_RA[r].tolist()):
                behind = tokens[: anchor + 1]
                for kind, flags in enumerate((rounds.accepted_RAk, rounds.rejected_RAk)):
                    for k in flags[r, a].nonzero().flatten().tolist():
                        drafts = rounds.proposals_RAk[r, a, :k].tolist()
                        if drafts and drafts[0] < 0:  # a run that was moved here
                            drafts = tokens[anchor + 1 : anchor + 1 + k]
                        plain = target.next_logits([*behind, *drafts])
                        found = states_RAkD[r, a, k] @ target.head.weight.T
                        torch.testing.assert_close(found, plain, atol=2e-3, rtol=2e-3)
                        checked[kind] += 1
        return states

    monkeypatch.setattr("paceline.train.objectives.judged_teacher", look)
    assert policy.judged_teacher is judged_teacher
    how = OnPolicy(
        anchors=anchors,
        reply_tokens=16,
        slots=4,
        records_per_shard=4,
        max_ahead=12,
        temperature=1.0,
    )
    every = (Phase(share=1.0, block_size=4, anchors_per_row=40),)
    config = setting(corpus, tmp_path, loss="draft_opd", on_policy=how, steps=4, phases=every)
    fit(config.replace(init_from=drafter), say=silent)
    assert checked[0] > 5 and checked[1] > 50


def test_replayed_blocks_are_the_blocks_that_were_drafted(
    corpus: tuple[str, str], drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5 through a record: with the weights that proposed, training drafts the same tokens."""
    inner, found = fit_module.batch_loss, []

    def look(config: Any, trainee: Any, rows: Any, blocks: Any, head: Any, given: Any) -> Any:
        prev, k = previous_ids(rows, blocks), blocks.block_size - 1
        features, _ = trainee.inputs(rows, blocks)
        with torch.no_grad():
            mine = trainee.model(
                blocks, features, lambda states, _drafter: best_drafts(states, head, prev, None)
            )
        judged = given.rounds.proposals_RAk.view(-1, k)
        same = head.ids_V[mine][judged >= 0] == judged[judged >= 0]
        found.append((len(same), float(same.float().mean())))
        return inner(config, trainee, rows, blocks, head, given)

    monkeypatch.setattr(fit_module, "batch_loss", look)
    how = OnPolicy(anchors="recorded", reply_tokens=16, slots=4, records_per_shard=4, max_ahead=12)
    every = (Phase(share=1.0, block_size=4, anchors_per_row=40),)
    config = setting(corpus, tmp_path, loss="draft_opd_code", on_policy=how, steps=1, phases=every)
    fit(config.replace(init_from=drafter), say=silent)
    ((count, share),) = found
    # Records and versions are bf16: near ties may fall the other way.
    assert count > 60 and share > 0.95


def test_settings_say_what_is_wrong(corpus: tuple[str, str], tmp_path: Path) -> None:
    found = parse_settings(
        ['on_policy={"anchors": "recorded"}', 'distil={"directions": ["forward", "forward"]}']
    )
    assert found["on_policy"] == OnPolicy(anchors="recorded")
    assert found["distil"] == Distil(directions=("forward", "forward"))
    for text, match in (
        ('on_policy={"source": "disk"}', "not one of rollout, replay"),
        ('on_policy={"source": "replay"}', "replay_from"),
        ('on_policy={"anchors": "all"}', "not one of drawn"),
        ('on_policy={"max_ahead": 16}', "two shards"),
        ('on_policy={"slot": 4}', "did you mean 'slots'"),
        ('distil={"clip_mode": "all"}', "not one of none, repo, vocab_entry"),
        ('distil={"alpha": 2}', "alpha is 0 to 1"),
        ('distil={"directions": ["forward", "back"]}', "not one of forward, reverse"),
        ('distil={"accepted": 0, "rejected": 0}', "not both 0"),
    ):
        with pytest.raises(ValueError, match=match):
            parse_settings([text])
    base = setting(corpus, tmp_path)
    with pytest.raises(ValueError, match="set on_policy with anchors"):
        base.replace(loss="draft_opd")
    with pytest.raises(ValueError, match="set on_policy with anchors"):
        base.replace(loss="draft_opd_code", on_policy=None)
    with pytest.raises(ValueError, match="a step takes"):
        base.replace(rows_per_step=5)
    config = base.replace(on_policy=replace(base.on_policy, asynchronous=False))
    with pytest.raises(ValueError, match="asynchronous=true"):
        serve_rollouts(config, None, "", [])  # type: ignore[arg-type]


# --- two processes ------------------------------------------------------------------------------

_NOTES = "trained.jsonl"


def note_training(run: Path) -> None:
    """Let this process append step, ids and versions of every batch, as they are given out."""
    real, read, ids = RolloutSource.batch, RecordReader.read, list[tuple[int, int]]()

    def noted(self: RecordReader, number: int) -> Any:
        record = read(self, number)
        ids.append((record.id, record.version))
        return record

    def batch(self: RolloutSource, step: int) -> Any:
        ids.clear()
        found = real(self, step)
        with (run / _NOTES).open("a") as stream:
            line = {"step": step, "ids": ids, "stale": found.counts["stale"]}
            stream.write(json.dumps(line) + "\n")
        return found

    RecordReader.read, RolloutSource.batch = noted, batch  # type: ignore[method-assign]


def train_process(config: TrainConfig) -> None:
    torch.set_num_threads(1)
    note_training(Path(config.run_dir))
    fit(config, say=silent)


def rollout_process(config: TrainConfig) -> None:
    torch.set_num_threads(1)
    roll_out_for(config, say=silent)


def test_no_record_is_lost_or_trained_twice_whoever_is_killed(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    """Five kills (SIGKILL) of either process at random moments; both are started again."""
    steps, rng = 40, random.Random(int(os.environ.get("PACELINE_TEST_SEED", "0")))
    how = OnPolicy(
        anchors="recorded",
        reply_tokens=8,
        slots=4,
        records_per_shard=4,
        publish_every=3,
        asynchronous=True,
        max_ahead=12,
        max_stale=None,
    )
    config = setting(corpus, tmp_path, steps=steps, eval_every=steps, checkpoint_seconds=0.4)
    config = config.replace(on_policy=how, loss="draft_opd_code")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["paceline.train.worker", "transformers.models.llama", "test_on_policy"]
    )

    def start(work: Callable[[TrainConfig], None]) -> Any:
        process = context.Process(target=work, args=(config,), daemon=True)
        process.start()
        return process

    jobs: dict[str, Callable[[TrainConfig], None]] = {
        "train": train_process,
        "rollout": rollout_process,
    }
    running = {name: start(work) for name, work in jobs.items()}
    versions, seen, kills = Versions(versions_folder(tmp_path)), list[int](), 0
    deadline, next_kill, notes = time.monotonic() + 120, 0.0, 0
    while running["train"].exitcode is None or kills < 5:
        assert time.monotonic() < deadline, (kills, seen[-1:])
        if (newest := versions.newest()) is not None:
            seen.append(newest)
        before, notes = notes, count_notes(tmp_path)
        # The first one hits the trainer within a step: what it has taken must be taken again.
        due = notes > max(before, 4) if kills == 0 else time.monotonic() > next_kill
        if kills < 5 and due:
            name = "train" if kills == 0 else rng.choice(["train", "rollout"])
            assert running["train"].exitcode is None, "finished before five kills: raise steps"
            running[name].kill()
            running[name].join()
            running[name] = start(jobs[name])
            kills, next_kill = kills + 1, time.monotonic() + rng.uniform(0.2, 1.5)
        time.sleep(0.002)
    assert running["train"].exitcode == 0
    running["rollout"].join(timeout=30)
    assert running["rollout"].exitcode == 0, "it ends by itself when the run is done"
    check_each_once(tmp_path, config, steps)
    assert seen == sorted(seen) and len(set(seen)) > 5, "versions only grow"


def count_notes(run: Path) -> int:
    path = run / _NOTES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_each_once(run: Path, config: TrainConfig, steps: int) -> None:
    """Of each step the last try counts, for an earlier one was undone by going back."""
    tries = [json.loads(line) for line in (run / _NOTES).read_text().splitlines()]
    last = {entry["step"]: entry["ids"] for entry in tries}
    ids = [number for step in range(steps) for number, _version in last[step]]
    assert ids == list(range(steps * config.rows_per_step))
    assert len(tries) > steps, "the first kill undid a step at least"
    assert totals(run)["records"] == steps * config.rows_per_step
    drafted_by = [version for step in range(steps) for _number, version in last[step]]
    assert max(drafted_by) > 3, "rollouts took new versions"
    reader = RecordReader(records_folder(run), record_origin(config, fingerprint_of(config)))
    assert reader.available >= len(ids)
    for number in range(reader.first, reader.available):
        assert reader.read(number).id == number


def fingerprint_of(config: TrainConfig) -> str:
    return target_fingerprint(load_frozen(config.target, torch.float32))
