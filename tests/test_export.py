"""The plain folder: wrong heads and folders are refused, and what it writes loads again.

Does not know engines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.drafters.dflash import draft_to_target, load_dflash
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
