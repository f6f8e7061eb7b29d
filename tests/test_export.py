"""The plain folder: wrong heads and folders are refused, and what it writes loads again.

Does not know engines.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafters.dflash import (
    DFlashModule,
    draft_to_target,
    init_random,
    load_dflash,
    save_dflash,
)
from paceline.drafters.dflash_draft import DFlashDrafter
from paceline.export.plain import export_plain
from test_dflash_module import saved, tiny
from tiny import tiny_target


def test_export_loads_and_its_head_is_the_targets(tmp_path: Path) -> None:
    target = tiny_target()
    saved(tmp_path / "d", tiny(draft_vocab_size=40, num_target_layers=3, target_layer_ids=(0, 1)))
    out = export_plain(tmp_path / "d", tmp_path / "out", target.head.weight)
    _, module, d2t = load_dflash(out)
    assert d2t is not None
    DFlashDrafter.load(out, target)  # warnings are errors in tests
    state = load_file(out / "model.safetensors")
    rows = target.head.weight[draft_to_target(d2t)].bfloat16()
    assert torch.equal(state["lm_head.weight"], rows)
    save_file({**state, "lm_head.weight": rows + 1}, out / "model.safetensors")
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not the target's"):
        DFlashDrafter.load(out, target)


def test_wrong_heads_and_places_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "d"
    saved(source, tiny(draft_vocab_size=40))
    for shape in ((97, 31), (98, 32), (40, 32)):
        with pytest.raises(ValueError, match="head is"):
            export_plain(source, tmp_path / "out", torch.zeros(shape))
    with pytest.raises(ValueError, match="needs the target's head"):
        export_plain(source, tmp_path / "out")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", source):
        with pytest.raises(ValueError, match="no empty folder"):
            export_plain(source, place, torch.zeros(97, 32))
    assert not (tmp_path / "out").exists()


def test_heads_are_left_out_of_the_plain_format(tmp_path: Path) -> None:
    heads = {"xpress_rank": 4, "markov_rank": 4, "thresh_head_bottleneck_dim": 4}
    config = tiny(**heads, num_jacobi_passes=2)
    module = DFlashModule(config)
    init_random(module, torch.Generator().manual_seed(0))
    save_dflash(tmp_path / "d", config, module)
    out = export_plain(tmp_path / "d", tmp_path / "out")
    plain, bare, _ = load_dflash(out)
    assert plain == replace(config, **dict.fromkeys(heads), num_jacobi_passes=6)
    kept = load_dflash(tmp_path / "d")[1].state_dict()
    assert bare.state_dict().keys() < kept.keys()
    for name, weight in bare.state_dict().items():
        assert torch.equal(weight, kept[name])
    text = (out / "config.json").read_text()
    assert "xpress" not in text and "markov" not in text and "thresh" not in text
