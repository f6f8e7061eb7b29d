"""The losses of refiners and length heads against dense twins, and tiny runs that train them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core import SamplingParams
from paceline.drafters.dflash import load_dflash, read_config
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.drafters.heads import MarkovHead, XPressHead, init_head
from paceline.drafters.refine import Refine
from paceline.pipeline import Pipeline
from paceline.target import Target
from paceline.train.blocks import every, make_blocks
from paceline.train.capture import load_frozen
from paceline.train.config import LengthHead, Phase, Refiner, TrainConfig, parse_settings
from paceline.train.corpus import Row
from paceline.train.features import FeatureRow
from paceline.train.fit import fit
from paceline.train.losses import ce_rule, distance_rule, mixed_rule, refined_head_loss
from paceline.train.objectives import best_drafts, previous_ids
from paceline.train.policy import supervise
from paceline.train.trainee import Head, row_of
from tiny import tiny_model

V, D, RANK, WORDS = 97, 32, 8, 60


def dense_loss(logits: Tensor, labels: Tensor, p: Tensor, tv: float) -> Tensor:
    """Cross-entropy and total variation of [T, V'] logits, each position's."""
    q = logits.softmax(-1)
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return (1 - tv) * ce + tv * (p - q).abs().sum(-1) / 2


@pytest.mark.parametrize("chunk", [3, 8, 512])
@pytest.mark.parametrize("tv", [0.0, 0.4, 1.0])
def test_refined_loss_equals_autograd_on_dense_logits(chunk: int, tv: float) -> None:
    torch.manual_seed(0)
    states = torch.randn(11, D, requires_grad=True)
    latents = torch.randn(2, 11, RANK, requires_grad=True)
    readout = torch.randn(WORDS, RANK, requires_grad=True)
    head, teacher = torch.randn(WORDS, D) / D**0.5, torch.randn(11, D)
    labels, weights = torch.randint(0, WORDS, (11,)), torch.rand(11)
    weights[4] = 0
    shares = [0.6, 1.0, 0.3]
    rule = mixed_rule(ce_rule(labels), distance_rule(teacher, head, "tv"), tv)
    loss = refined_head_loss(states, latents, readout, head, weights, shares, rule, chunk)
    p = (teacher @ head.T).softmax(-1)
    base = states @ head.T
    logits = [base, base + latents[0] @ readout.T, base + latents[1] @ readout.T]
    plain = sum(
        share * (dense_loss(each, labels, p, tv) * weights).sum()
        for share, each in zip(shares, logits, strict=True)
    )
    assert isinstance(plain, Tensor)
    torch.testing.assert_close(loss, plain)
    parts = (states, latents, readout)
    for found, want in zip(
        torch.autograd.grad(loss, parts), torch.autograd.grad(plain, parts), strict=True
    ):
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_previous_ids_are_the_texts_own() -> None:
    tokens = np.arange(10, 22).astype(np.int32)
    row = Row(tokens=tokens, start=3, source="", temperature=0.0, held_out=False)
    items = [FeatureRow(row, np.zeros((12, 4), np.uint16))]
    blocks = make_blocks([row], anchors=8, block_size=4, choose=every)
    prev = previous_ids(items, blocks)
    assert prev[0].tolist() == [12, 13, 14, 15]  # anchor at 3 is token 13
    assert prev[-1].tolist() == [19, 20, 21, 0]  # anchor at 10; nothing follows token 21
    assert (prev[:, 1].view(1, -1) == blocks.anchor_ids_RA).all()
    inside = blocks.labels_RAk[0, :, 0] >= 0
    assert (prev[inside][:, 2] == blocks.labels_RAk[0, inside, 0]).all()


def heads(kind: str) -> Any:
    head: Any = MarkovHead(V, WORDS, RANK)
    if kind == "xpress":
        head = XPressHead(V, WORDS, D, 5, RANK, 2)
    init_head(head, torch.Generator().manual_seed(1), std=0.6)
    if kind == "xpress":
        torch.nn.init.normal_(head.mix_l, std=0.5, generator=torch.Generator().manual_seed(2))
    return head


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_best_drafts_are_the_walk_through_the_block(kind: str) -> None:
    torch.manual_seed(3)
    ids = torch.randperm(V)[:WORDS].sort().values
    head = Head(torch.randn(WORDS, D), row_of(ids, V), ids)
    refiner, states = heads(kind), torch.randn(6, 5, D)
    prev = torch.randint(0, V, (6, 5))
    found = best_drafts(states, head, prev, refiner)
    own, base = prev.clone(), states[:, 1:] @ head.rows_VD.T
    for k in range(4):
        bias = refiner.bias(states, states.mean(1), own)[:, k + 1]
        best = (base[:, k] + bias).argmax(-1)
        assert torch.equal(found[:, k], best)
        if k + 2 < 5:
            own[:, k + 2] = ids[best]
    assert not torch.equal(found, best_drafts(states, head, prev, None))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny target's folder and greedy rows of its own, in which the next token follows a rule."""
    folder = tmp_path_factory.mktemp("objectives")
    model = tiny_model("llama", num_hidden_layers=4, hidden_size=D)
    model.save_pretrained(folder / "target")
    rng, lines = np.random.default_rng(0), []
    for _ in range(40):
        prompt = rng.integers(1, V, 5).tolist()
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
        lines.append(
            json.dumps({"prompt_ids": prompt, "response_ids": out[0, 5:].tolist(), "source": "x"})
        )
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
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
        steps=12,
        rows_per_step=3,
        compute="fp32",
        held_out_share=0.2,
        eval_every=12,
        eval_rows=8,
        draft_vocab_size=80,
        lr=5e-3,
    )
    return base.replace(**changes)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


REFINERS = {
    "xpress": Refiner(kind="xpress", rank=RANK, passes=3),
    "markov": Refiner(kind="markov", rank=RANK, free_sweeps=0),
}


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_the_served_estimate_is_what_the_refined_drafts_get(
    corpus: tuple[str, str], tmp_path: Path, kind: str
) -> None:
    """Law 5 and more: training's logits, walked on held-out text, accept what decoding accepts."""
    config = setting(corpus, tmp_path, refiner=REFINERS[kind], compute="fp32", steps=30)
    outcome = fit(config, say=lambda _: None)
    entry = log_of(tmp_path)[-1]
    target = Target(load_frozen(corpus[0], torch.float32))
    _, _, d2t = load_dflash(outcome.drafter)
    drafter = DFlashDrafter.load(outcome.drafter, target)
    stage = Refine(drafter, kind)
    pipeline = Pipeline(target=target, drafter=drafter, stages=(stage,))
    from paceline.train.fit import read_rows

    held = [row for part in read_rows(config) for row in part.rows if row.held_out][:8]
    prompts = [row.tokens[: row.start].tolist() for row in held]
    params = [SamplingParams(max_tokens=len(row.reply), ignore_eos=True) for row in held]
    outputs = pipeline.generate(prompts, params)
    rounds = [r for output in outputs for r in output.outputs[0].rounds[1:]]
    for row, output in zip(held, outputs, strict=True):
        assert output.outputs[0].token_ids == row.reply.tolist()
    assert len(rounds) == entry["served_rounds"]
    assert sum(r.accepted for r in rounds) > 0


def test_a_refiner_learns_what_the_block_cannot_know(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    """Loss falls, all its weights move, and the drafter without it is still there."""
    config = setting(corpus, tmp_path, refiner=REFINERS["xpress"], steps=60, head_lr=1e-2)
    fit(config, say=lambda _: None)
    losses = [entry["loss"] for entry in log_of(tmp_path) if "loss" in entry]
    assert losses[-1] < losses[0]
    _, module, _ = load_dflash(tmp_path / "drafter", torch.float32)
    assert module.xpress_head.mix_l.tril().abs().max() > 0
    assert not module.xpress_head.mix_l.triu(1).any()  # what is masked gets no gradient
    shape = read_config(tmp_path / "drafter")
    assert (shape.xpress_rank, shape.num_jacobi_passes, shape.refiners) == (RANK, 3, ("xpress",))


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_words_that_a_phase_leaves_out_get_no_bias(
    corpus: tuple[str, str], tmp_path: Path, kind: str
) -> None:
    """Half of the words, all of the run: the others' rows stay zero, and drafting may still use them."""
    phase = Phase(share=1.0, block_size=4, anchors_per_row=6, words=40)
    config = setting(corpus, tmp_path, refiner=REFINERS[kind], phases=(phase,))
    outcome = fit(config, say=lambda _: None)
    _, module, _ = load_dflash(outcome.drafter, torch.float32)
    moved = module.get_submodule(f"{kind}_head").readout.weight.abs().sum(-1) > 0  # type: ignore[union-attr]
    assert moved.sum() == 40 and len(moved) == 80


def test_a_length_head_alone_leaves_the_drafter_as_it_was(
    corpus: tuple[str, str], tmp_path: Path
) -> None:
    """Refiner and words are the drafter's, whatever the recipe says of them."""
    first = fit(setting(corpus, tmp_path / "a", refiner=REFINERS["xpress"]), say=lambda _: None)
    config = setting(
        corpus,
        tmp_path / "b",
        length_head=LengthHead(bottleneck=16, alone=True),
        draft_vocab_size=50,
        init_from=str(first.drafter),
        steps=80,
    )
    second = fit(config, say=lambda _: None)
    _, before, vocabulary = load_dflash(first.drafter, torch.float32)
    _, after, same_vocabulary = load_dflash(second.drafter, torch.float32)
    assert vocabulary is not None and same_vocabulary is not None
    assert torch.equal(vocabulary, same_vocabulary)
    for name, weight in before.state_dict().items():
        if name != "fc.weight":  # scaled by the features' magnitude and back
            assert torch.equal(weight, after.state_dict()[name]), name
    losses = [entry["loss"] for entry in log_of(tmp_path / "b") if "loss" in entry]
    assert 0 <= losses[-1] < 0.2
    for changes, match in (
        ({"refiner": REFINERS["markov"]}, "has xpress of rank 8: leave refiner out"),
        ({"phases": (Phase(share=1.0, block_size=3, anchors_per_row=6),)}, "blocks of 4"),
    ):
        if "phases" in changes:
            changes = {**changes, "block_size": 3}
        with pytest.raises(ValueError, match=match):
            fit(config.replace(run_dir=str(tmp_path / "c"), **changes), say=lambda _: None)


def test_a_run_says_which_heads_it_leaves_behind(corpus: tuple[str, str], tmp_path: Path) -> None:
    first = fit(setting(corpus, tmp_path / "a", refiner=REFINERS["xpress"]), say=lambda _: None)
    for changes, told in (({}, True), ({"refiner": REFINERS["xpress"]}, False)):
        said: list[str] = []
        config = setting(corpus, tmp_path / f"b{told}", init_from=str(first.drafter), steps=1)
        fit(config.replace(**changes), say=said.append)
        assert any("xpress head does not go on" in line for line in said) == told


def test_parts_of_a_step_weigh_what_the_whole_does(corpus: tuple[str, str], tmp_path: Path) -> None:
    """The same gradient norm in one part and in three, for the sum of both losses."""
    norms = []
    for parts in (1, 3):
        config = setting(
            corpus,
            tmp_path / str(parts),
            length_head=LengthHead(bottleneck=16),
            micro_batches=parts,
            steps=1,
        )
        fit(config, say=lambda _: None)
        norms.append([e for e in log_of(tmp_path / str(parts)) if "loss" in e][0])
    for name in ("loss", "grad_norm"):
        assert norms[0][name] == pytest.approx(norms[1][name], rel=1e-4)


def test_blocks_whose_first_word_no_draft_can_be_count_for_their_length(
    corpus: tuple[str, str],
) -> None:
    tokens = np.arange(10, 22).astype(np.int32)
    row = Row(tokens=tokens, start=3, source="", temperature=0.0, held_out=False)
    blocks = make_blocks([row], anchors=8, block_size=4, choose=every)
    known = torch.tensor([*range(10, 15), *range(16, 22)])
    head = Head(torch.randn(len(known), D), row_of(known, V), known)
    found = supervise(setting(corpus, Path("unused")), head, blocks)
    unknown = (blocks.labels_RAk[0, :, 0] == 15).nonzero().item()
    assert found.blocks_RA[0, unknown] > 0 and found.weights_RAk[0, unknown, 0] == 0
    assert found.blocks_RA.sum() == pytest.approx(1)


def test_the_refiner_of_an_earlier_drafter_goes_on(corpus: tuple[str, str], tmp_path: Path) -> None:
    first = fit(setting(corpus, tmp_path / "a", refiner=REFINERS["xpress"]), say=lambda _: None)
    again = setting(
        corpus, tmp_path / "b", refiner=REFINERS["xpress"], init_from=str(first.drafter)
    )
    second = fit(again.replace(steps=1, lr=1e-9), say=lambda _: None)
    _, before, _ = load_dflash(first.drafter, torch.float32)
    _, after, _ = load_dflash(second.drafter, torch.float32)
    torch.testing.assert_close(after.xpress_head.readout.weight, before.xpress_head.readout.weight)
    other = again.replace(run_dir=str(tmp_path / "c"), refiner=REFINERS["markov"], steps=1, lr=1e-9)
    third = fit(other, say=lambda _: None)
    assert read_config(third.drafter).refiners == ("markov",)


def test_settings_of_heads_say_what_is_wrong() -> None:
    found = parse_settings(['refiner={"kind": "xpress", "rank": 16}', "length_head=null"])
    assert found["refiner"] == Refiner(kind="xpress", rank=16) and found["length_head"] is None
    for text, match in (
        ('refiner={"kind": "gru"}', "not xpress or markov"),
        ('refiner={"knd": "xpress"}', "did you mean 'kind'"),
        ("refiner=xpress", "must be a JSON object"),
        ('refiner={"rank": 8}', "kind"),
        ('refiner={"kind": "markov", "free_sweeps": 1}', "walks"),
        ('refiner={"kind": "markov", "free_sweeps": 0, "tv": 2}', "tv is a share"),
        ('length_head={"bottleneck": 0}', "at least 1"),
    ):
        with pytest.raises(ValueError, match=match):
            parse_settings([text])


def test_a_refiner_needs_one_block_size(corpus: tuple[str, str], tmp_path: Path) -> None:
    base = setting(corpus, tmp_path)
    short = (replace(base.phases[0], share=0.5, block_size=3), replace(base.phases[0], share=0.5))
    with pytest.raises(ValueError, match="one block size"):
        base.replace(phases=short, refiner=REFINERS["xpress"])
    with pytest.raises(ValueError, match="set init_from"):
        base.replace(length_head=LengthHead(alone=True))
    with pytest.raises(ValueError, match="leave loss at ce"):
        base.replace(loss="tv", refiner=REFINERS["xpress"])
