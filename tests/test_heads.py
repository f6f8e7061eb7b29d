"""Drafters with heads: their folders, and pipelines that refine through real modules.

Does not know the laws of refined drafts (tests/laws/test_refine.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.api import packaged_with
from paceline.cli.common import load_pipeline
from paceline.core import SamplingParams
from paceline.drafters.dflash import DFlashConfig, init_random, load_dflash
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.refine import Refine
from paceline.evaluate.methods import parse_method
from paceline.pipeline import Pipeline
from test_dflash_module import saved, tiny
from test_drafters import dflash
from tiny import tiny_target

HEADS: dict[str, dict[str, Any]] = {
    "markov": {"markov_rank": 4},
    "xpress": {"xpress_rank": 4, "xpress_mlp_ratio": 3, "num_jacobi_passes": 2},
    "length": {"thresh_head_bottleneck_dim": 6},
}
ALL = {key: value for head in HEADS.values() for key, value in head.items()}


def refining(kind: str, target: Any, block: int = 4, **changes: Any) -> DFlashDrafter:
    """A random drafter whose refiner has a say in every slot."""
    drafter = dflash(target, block_size=block, **HEADS[kind], **changes)
    head = drafter.module.get_submodule(f"{kind}_head")
    for name, weight in head.named_parameters():
        nn.init.normal_(weight, std=0.7, generator=torch.Generator().manual_seed(len(name)))
    return drafter


@pytest.mark.parametrize("kind", ["xpress", "markov"])
@pytest.mark.parametrize("block", [2, 5])
@pytest.mark.parametrize("reduced", [False, True])
def test_refined_replies_are_plain_ones(kind: str, block: int, reduced: bool) -> None:
    """Ragged rows, greedy and sampled, alone and together; and the refiner does change drafts."""
    target = tiny_target()
    drafter = refining(kind, target, block, reduced=reduced)
    stage, seen = Refine(drafter, kind), [0]

    def counted(draft: Any, ctx: Any) -> Any:
        out = stage(draft, ctx)
        seen[0] += int((out.tokens_BN != draft.tokens_BN).sum())
        return out

    counted.law = stage.law  # type: ignore[attr-defined]
    pipeline = Pipeline(target=target, drafter=drafter, stages=(counted,))  # type: ignore[arg-type]
    prompts = [list(range(3, 6 + 3 * i)) for i in range(4)]
    params = [SamplingParams(max_tokens=14, temperature=i % 2, seed=i) for i in range(4)]
    plain = pipeline.plain().generate(prompts, params)
    together = pipeline.generate(prompts, params, batch_size=3)
    alone = [pipeline.generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    for want, *found in zip(plain, together, alone, strict=True):
        for output in found:
            assert output.outputs[0].token_ids == want.outputs[0].token_ids
    assert seen[0] > 0
    greedy = SamplingParams(max_tokens=14)
    sampling = Refine(drafter, kind, samples=True)
    ruled = Pipeline(target=target, drafter=drafter, accept="rejection", stages=(sampling,))
    for want, got in zip(
        pipeline.plain().generate(prompts, greedy), ruled.generate(prompts, greedy), strict=True
    ):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids


def test_a_row_whose_refined_logits_are_nan_is_not_verified() -> None:
    target = tiny_target()
    drafter = refining("xpress", target)
    drafter.module.get_submodule("xpress_head.token_embed").weight[5] = float("nan")  # type: ignore[operator,union-attr]
    pipeline = Pipeline(target=target, drafter=drafter, stages=(Refine(drafter, "xpress"),))
    params = SamplingParams(max_tokens=12)
    (want,) = pipeline.plain().generate([[3, 4, 5]], params)
    (got,) = pipeline.generate([[3, 4, 5]], params)
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.outputs[0].rounds[1].drafted == 0  # its previous token is 5


@pytest.mark.parametrize("heads", [*HEADS, "all"])
def test_folders_keep_heads_bit_for_bit_and_miss_nothing(heads: str, tmp_path: Path) -> None:
    chosen = ALL if heads == "all" else HEADS[heads]
    saved(tmp_path / "d", tiny(**chosen))
    config, module, _ = load_dflash(tmp_path / "d")
    assert {key: getattr(config, key) for key in chosen} == chosen
    file = tmp_path / "d" / "model.safetensors"
    state = load_file(file)
    names = [name for name in state if "_head" in name.partition(".")[0]]
    assert names and all(torch.equal(module.state_dict()[name], state[name]) for name in names)

    def refused(change: dict[str, Tensor], named: str) -> None:
        save_file(change, file)
        with pytest.raises(ValueError, match=named):
            load_dflash(tmp_path / "d")

    first = names[0]
    refused({n: w for n, w in state.items() if n != first}, first)
    refused({**state, f"{first}x": state[first].clone()}, f"{first}x")
    refused({**state, first: torch.cat((state[first], state[first]))}, first)


def test_config_keys_of_all_readers_agree() -> None:
    written = tiny(**ALL).to_dict()
    assert DFlashConfig.from_dict(written) == tiny(**ALL)
    engine = {
        k: v for k, v in written.items() if k not in ("xpress_mlp_ratio", "num_jacobi_passes")
    }
    assert DFlashConfig.from_dict(engine) == tiny(**ALL)  # vLLM's names alone
    for key, value in (
        ("xpress_block_size", 9),
        ("xpress_mlp_hidden", 5),
        ("xpress_num_passes", 7),
        ("markov_head_type", "gated"),
        ("thresh_head_direct_len", False),
        ("use_thresh_head_two_model", False),
    ):
        with pytest.raises(ValueError, match=key):
            DFlashConfig.from_dict(written | {key: value})


def test_a_stage_needs_its_head() -> None:
    target = tiny_target()
    for drafter in (NgramDrafter(), dflash(target)):
        with pytest.raises(ValueError, match="no xpress head"):
            Refine(drafter, "xpress")
    with pytest.raises(ValueError, match="takes no number of sweeps"):
        Refine(refining("markov", target), "markov", sweeps=2)
    with pytest.raises(ValueError, match="at least 1 sweep"):
        Refine(refining("xpress", target), "xpress", sweeps=0)
    with pytest.raises(ValueError, match="'xpress' looks at tokens"):
        Pipeline(
            target=target,
            drafter=refining("xpress", target),
            accept="rejection",
            stages=(Refine(refining("xpress", target), "xpress"),),
        )


def test_names_find_the_packaged_drafter_that_has_the_head() -> None:
    class Named:
        name = "smollm2"

    assert parse_method("dflash").source(Named()) == "smollm2-dflash"
    assert parse_method("dflash+xpress:3+first:2").source(Named()) == "smollm2-xpress"
    assert packaged_with("smollm2-dflash", ["gru"]) == "smollm2-dflash"
    with pytest.raises(ValueError, match="not both"):
        load_pipeline("smollm2", "ngram", "dflash", "fp32")
    shape = json.loads(Path("src/paceline/weights/smollm2-xpress/config.json").read_text())
    assert shape["xpress_rank"] == 128 and shape["num_jacobi_passes"] == 4


def test_init_random_leaves_heads_silent() -> None:
    from paceline.drafters.dflash import DFlashModule

    module = DFlashModule(tiny(**ALL))
    init_random(module, torch.Generator().manual_seed(0))
    assert all(weight.isfinite().all() for weight in module.parameters())
    assert not module.get_parameter("xpress_head.mix_l").any()
