"""A matrix of planted faults, each found by its name; valid folders in five formats without any finding.

Does not know trained drafters, but for the packaged ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from paceline.cli import app
from paceline.core import Round
from paceline.drafters.dflash import DFlashConfig, DFlashModule, init_random, save_dflash
from paceline.evaluate.doctor import Examination, examine, live_check
from paceline.evaluate.doctor_alarm import ENOUGH, Alarm
from paceline.evaluate.doctor_facts import read_drafter
from tiny import tiny_model

Config = dict[str, Any]
State = dict[str, Tensor]
FORMATS = ["dflash", "specforge", "speculators", "eagle3", "pard", "dflare"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a valid random drafter of every format beside it."""
    folder = tmp_path_factory.mktemp("doctor")
    model = tiny_model("llama", num_hidden_layers=5, eos_token_id=2)
    model.save_pretrained(folder / "target")
    for name in FORMATS:
        make(folder / name, name, model)
    return folder


def make(folder: Path, name: str, model: Any) -> None:
    changes: Config = {"layerwise_fusion": True, "split_kv": True} if name == "dflare" else {}
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=97, block_size=5, num_target_layers=5,
        mask_token_id=96, target_layer_ids=(0, 2, 3), max_position_embeddings=128,
        draft_vocab_size=40, **changes,
    )  # fmt: skip
    module = DFlashModule(config)
    generator = torch.Generator().manual_seed(0)
    init_random(module, generator)
    with torch.no_grad():
        for i, weight in enumerate(module.parameters()):
            weight.mul_(1 + 0.3 * (i % 4)).add_(
                0.01 * torch.randn(weight.shape, generator=generator)
            )
    d2t = 2 * torch.arange(40) - torch.arange(40)
    save_dflash(folder, config, module, d2t)
    if name in ("dflash", "dflare"):
        return
    data, state = read(folder)
    inner = data["dflash_config"]
    if name == "specforge":
        inner |= {"projector_type": None, "pure_draft_prefix_len": 0, "shift_label": False}
    if name == "speculators":
        layer = {k: v for k, v in data.items() if k not in ("dflash_config", "block_size")}
        data = {
            "speculators_model_type": "dflash", "speculators_version": "0.9.0", "block_size": 5,
            "transformer_layer_config": layer, "mask_token_id": 96, "draft_vocab_size": 40,
            "aux_hidden_state_layer_ids": [1, 3, 4],
            "speculators_config": {
                "algorithm": "dflash", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip
    if name == "eagle3":
        keep = {k: v for k, v in data.items() if k not in ("dflash_config", "block_size")}
        data = keep | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
        data |= {"layer_types": ["full_attention"], "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
        state = eagle3(state, generator)
    if name == "pard":
        shutil.rmtree(folder)
        model.save_pretrained(folder)
        data, state = read(folder)
        data["pard_token"] = 96
        for name_, weight in state.items():  # norms of exactly 1 would be an untrained model's
            state[name_] = weight * 1.3 if "norm" in name_ else weight
    write(folder, data, state)


def eagle3(state: State, generator: torch.Generator) -> State:
    new = {k: state[k] for k in ("d2t", "t2d", "norm.weight", "fc.weight")}
    for name, weight in state.items():
        if name.startswith("layers.0.") and "_norm.weight" not in name:
            wide = any(f".{part}_proj" in name for part in "qkv")
            key = name.replace("layers.0.", "midlayer.")
            new[key] = torch.cat((weight, 2 * weight), 1) if wide else weight
    new["midlayer.hidden_norm.weight"] = 1.5 * new["norm.weight"]
    for part in ("input_layernorm", "post_attention_layernorm"):
        new[f"midlayer.{part}.weight"] = state[f"layers.0.{part}.weight"]
    new["lm_head.weight"] = torch.randn(40, 32, generator=generator).bfloat16()
    return {name: weight.contiguous() for name, weight in new.items()}


def read(folder: Path) -> tuple[Config, State]:
    data = json.loads((folder / "config.json").read_text())
    return data, load_file(folder / "model.safetensors")


def write(folder: Path, data: Config, state: State) -> None:
    (folder / "config.json").write_text(json.dumps(data))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def set_in(where: str | None, **values: Any) -> Callable[[Config, State], None]:
    def change(data: Config, state: State) -> None:
        (data if where is None else data[where]).update(values)

    return change


def drop(where: str | None, key: str) -> Callable[[Config, State], None]:
    def change(data: Config, state: State) -> None:
        del (data if where is None else data[where])[key]

    return change


def tensor(name: str, how: Callable[[Tensor], Tensor | None]) -> Callable[[Config, State], None]:
    def change(data: Config, state: State) -> None:
        new = how(state.pop(name))
        if new is not None:
            state[name] = new.contiguous()

    return change


def rename(old: str, new: str) -> Callable[[Config, State], None]:
    def change(data: Config, state: State) -> None:
        state[new] = state.pop(old)

    return change


def untrained(data: Config, state: State) -> None:
    for name, weight in state.items():
        if "norm" in name:
            state[name] = torch.ones_like(weight)
        elif weight.dim() == 2:
            state[name] = (0.02 * torch.randn(weight.shape)).bfloat16()


def odd_embedding(data: Config, state: State) -> None:
    state["embed_tokens.weight"] = torch.randn(97, 32).bfloat16()


def both_taps(data: Config, state: State) -> None:
    data["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]


def wide(data: Config, state: State) -> None:
    data["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5


def no_map(data: Config, state: State) -> None:
    state["d2t"] = torch.zeros_like(state["d2t"])
    state["t2d"] = torch.arange(97) < 40


D, T = "dflash_config", "transformer_layer_config"
FAULTS: list[tuple[str, str, Callable[[Config, State], None]]] = [
    ("width-differs", "dflash", set_in(None, hidden_size=64)),
    ("width-differs", "eagle3", set_in(None, target_hidden_size=64)),
    ("depth-differs", "dflash", set_in(None, num_target_layers=36)),
    ("heads-do-not-divide", "speculators", set_in(T, num_key_value_heads=3)),
    ("taps-missing", "speculators", drop(None, "aux_hidden_state_layer_ids")),
    ("taps-out-of-range", "dflash", set_in(D, target_layer_ids=[0, 2, 4])),
    ("taps-out-of-range", "dflash", set_in(D, target_layer_ids=[-1, 2, 3])),
    ("taps-out-of-range", "speculators", set_in(None, aux_hidden_state_layer_ids=[0, 2, 3])),
    ("taps-off-by-one", "dflash", both_taps),
    ("taps-count", "speculators", set_in(None, aux_hidden_state_layer_ids=[1, 2, 3, 4])),
    ("taps-unsorted", "dflash", set_in(D, target_layer_ids=[2, 0, 3])),
    ("taps-repeated", "dflash", set_in(D, target_layer_ids=[0, 0, 3])),
    ("taps-malformed", "eagle3", set_in(None, eagle_aux_hidden_state_layer_ids="1,3,4")),
    ("mask-missing", "dflash", drop(D, "mask_token_id")),
    ("mask-missing", "pard", drop(None, "pard_token")),
    ("mask-out-of-range", "specforge", set_in(D, mask_token_id=97)),
    ("mask-is-eos", "speculators", set_in(None, mask_token_id=2)),
    ("vocab-differs", "dflash", set_in(None, vocab_size=128)),
    ("draft-vocab-too-large", "dflash", set_in(None, draft_vocab_size=200)),
    ("key-conflict", "specforge", set_in(None, mask_token_id=95)),
    ("rope-conflict", "dflash", set_in(None, rope_parameters={"rope_theta": 1e6})),
    ("rope-differs", "dflash", set_in(None, rope_theta=1e6)),
    ("rope-missing", "eagle3", drop(None, "rope_theta")),
    ("positions-short", "eagle3", set_in(None, max_position_embeddings=32)),
    ("block-size", "dflash", set_in(None, block_size=1)),
    ("block-convention", "speculators", wide),
    ("samples-from-anchor", "speculators", set_in(None, sample_from_anchor=True)),
    ("causal-override", "speculators", set_in(None, sliding_window_non_causal=False)),
    ("causal-conflict", "dflash", set_in(None, is_causal=True, causal=False)),
    ("layer-types", "speculators", set_in(T, layer_types=["full_attention"])),
    ("dtype-fp16", "dflash", set_in(None, dtype="float16")),
    ("quantised", "pard", set_in(None, quantization_config={"quant_method": "awq"})),
    ("tensor-missing", "dflash", rename("fc.weight", "fuse.weight")),
    ("tensor-unknown", "dflash", rename("fc.weight", "fuse.weight")),
    ("tensor-missing", "eagle3", tensor("lm_head.weight", lambda w: None)),
    ("tensor-missing", "dflare", tensor("layer_fusion_weights", lambda w: None)),
    ("tensor-shape", "speculators", tensor("fc.weight", lambda w: w[:, :64])),
    ("tensor-nan", "eagle3", tensor("fc.weight", lambda w: w * float("nan"))),
    ("tensor-constant", "pard", tensor("model.layers.0.mlp.up_proj.weight", torch.zeros_like)),
    ("untrained", "dflash", untrained),
    ("d2t-missing", "eagle3", tensor("d2t", lambda w: None)),
    ("d2t-length", "dflash", tensor("d2t", lambda w: w[:30])),
    ("d2t-out-of-range", "eagle3", tensor("d2t", lambda w: w + 90)),
    ("d2t-absolute", "dflash", tensor("d2t", lambda w: w + torch.arange(len(w)) + 17)),
    ("d2t-identity", "dflash", no_map),
    ("d2t-without-size", "eagle3", drop(None, "draft_vocab_size")),
    ("t2d-disagrees", "dflash", tensor("t2d", lambda w: ~w)),
    ("borrowed-differs", "dflash", odd_embedding),
    ("rope-scaling", "dflash", set_in(None, rope_scaling={"rope_type": "yarn", "factor": 4.0})),
    ("config-malformed", "dflash", set_in(None, rope_scaling="yarn")),
    ("config-malformed", "dflash", set_in(None, hidden_size="32")),
    ("config-malformed", "specforge", set_in(None, max_position_embeddings="128")),
    ("config-malformed", "speculators", set_in(None, speculators_config=[1])),
    ("config-malformed", "eagle3", set_in(None, num_hidden_layers=10**7)),
    ("config-malformed", "pard", set_in(None, architectures=5, pard_token=96)),
    ("taps-malformed", "dflash", set_in(D, target_layer_ids=5)),
    ("taps-malformed", "speculators", set_in(None, aux_hidden_state_layer_ids=5)),
    ("config-refused", "dflash", drop(None, "vocab_size")),
    ("config-refused", "specforge", set_in(D, gru_hidden_dim=8)),
    ("architecture", "specforge", set_in(None, architectures=["DominoDraftModel"])),
]


def codes(found: Examination) -> set[str]:
    return {one.code for one in found.findings}


@pytest.mark.parametrize("name", FORMATS)
def test_valid_folders_have_no_finding(base: Path, name: str) -> None:
    found = examine(str(base / "target"), base / name)
    assert found.findings == [] and found.healthy
    assert found.format == {"dflare": "dflash"}.get(name, name)


@pytest.mark.parametrize("name", ["smollm2-dflash", "smollm2-xpress"])
def test_packaged_drafters_have_no_finding(name: str) -> None:
    assert examine("smollm2", name).findings == []


@pytest.mark.parametrize(
    ("code", "name", "plant"), FAULTS, ids=[f"{code}-{i}" for i, (code, _, _) in enumerate(FAULTS)]
)
def test_planted_faults_are_found(
    base: Path, tmp_path: Path, code: str, name: str, plant: Callable[[Config, State], None]
) -> None:
    folder = Path(shutil.copytree(base / name, tmp_path / "d"))
    data, state = read(folder)
    plant(data, state)
    write(folder, data, state)
    found = examine(str(base / "target"), folder)
    assert code in codes(found)
    assert all(one.fix and one.where and one.what for one in found.findings)
    serious = {"taps-unsorted", "rope-differs", "positions-short", "dtype-fp16", "d2t-identity"}
    serious |= {"rope-scaling", "architecture"}
    other_engines = code == "config-refused" and "gru_hidden_dim" in str(found.findings)
    assert found.healthy == (code in serious or other_engines)


def test_a_degenerate_mask_row_and_a_foreign_tokenizer_are_found(
    base: Path, tmp_path: Path
) -> None:
    target = Path(shutil.copytree(base / "target", tmp_path / "t"))
    data, state = read(target)
    state["model.embed_tokens.weight"][96] = 0
    write(target, data, state)
    assert codes(examine(str(target), base / "dflash")) == {"mask-row-degenerate"}
    folder = Path(shutil.copytree(examined_folder(), tmp_path / "d"))
    data, state = read(folder)
    data["dflash_config"]["vocabulary_fingerprint"] = "0" * 16
    write(folder, data, state)
    assert "tokenizer-differs" in codes(examine("smollm2", folder))
    data["dflash_config"]["mask_token_id"] = 1  # <|im_start|>
    write(folder, data, state)
    assert "mask-in-template" in codes(examine("smollm2", folder))


def test_another_padding_and_another_template_are_found(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(examined_folder(), tmp_path / "d"))
    data, state = read(folder)
    write(folder, data | {"vocab_size": data["vocab_size"] + 128}, state)
    padded = examine("smollm2", folder)
    assert "vocab-padding" in codes(padded) and "vocab-differs" not in codes(padded)
    write(folder, data, state)
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["fingerprint"] = {"template": "0" * 16}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    other = examine("smollm2", folder)
    assert codes(other) == {"template-differs"} and other.healthy


def examined_folder() -> Path:
    from paceline.api import packaged_drafters

    return packaged_drafters()["smollm2-dflash"]


def test_what_cannot_be_read_is_exit_code_2_by_name(base: Path, tmp_path: Path) -> None:
    target = str(base / "target")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        read_drafter(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    with pytest.raises(ValueError, match="no drafter that is known"):
        read_drafter(tmp_path)
    call = ["doctor", target, str(base / "dflash"), "--no-live", "--json", str(tmp_path / "o.json")]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0 and "0 errors" in result.output
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["healthy"] and found["live"] == {"ran": False, "why": "--no-live"}
    assert (
        CliRunner().invoke(app, ["doctor", "smollm2", str(base / "dflash"), "--no-live"]).exit_code
        == 1
    )
    missing = CliRunner().invoke(app, ["doctor", target, str(tmp_path / "none"), "--no-live"])
    assert isinstance(missing.exception, ValueError)


KEYS = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size", "block_size",
    "num_target_layers", "target_layer_ids", "mask_token_id", "rope_theta", "rope_parameters",
    "rope_scaling", "rms_norm_eps", "max_position_embeddings", "draft_vocab_size", "layer_types",
    "architectures", "dflash_config", "eagle_config", "speculators_config", "speculators_model_type",
    "transformer_layer_config", "aux_hidden_state_layer_ids", "causal", "is_causal", "sliding_window",
    "xpress_rank", "markov_rank", "thresh_head_bottleneck_dim", "quantization_config", "dtype",
    "attention_bias", "layerwise_fusion", "mask_token", "pard_token", "tie_word_embeddings",
]  # fmt: skip
VALUES: list[Any] = ["x", -1, 10**30, float("nan"), [1, "a"], {"a": 1}]


@pytest.mark.parametrize("name", FORMATS)
def test_no_value_of_any_key_is_more_than_a_finding_or_an_error_of_the_user(
    base: Path, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(base / name, tmp_path / "d"))
    data = json.loads((folder / "config.json").read_text())
    places = [data, *(part for key in (D, T) if isinstance(part := data.get(key), dict))]
    for key in KEYS:
        for value in VALUES:
            for at, place in enumerate(places):
                old = dict(place)
                place[key] = value
                (folder / "config.json").write_text(json.dumps(data))
                try:
                    found = examine(str(base / "target"), folder)
                    assert all(one.fix and one.where for one in found.findings), (key, value, at)
                except ValueError as error:
                    assert str(folder) in str(error), (key, value, at)
                place.clear()
                place.update(old)


def test_folders_that_are_none_are_named(base: Path, tmp_path: Path) -> None:
    target, drafter = str(base / "target"), str(base / "dflash")
    with pytest.raises(ValueError, match="is a drafter: name the target first"):
        examine(drafter, target)
    assert any("whole model" in one.what for one in examine(target, target).findings)
    with pytest.raises(ValueError, match="neither a folder nor a packaged one .smollm2-dflash"):
        examine(target, "smolm2-dflash")
    folder = Path(shutil.copytree(base / "dflash", tmp_path / "d"))
    shutil.copy(folder / "model.safetensors", folder / "optimizer.safetensors")
    with pytest.raises(ValueError, match=r"is in model\.safetensors and in optimizer"):
        examine(target, folder)
    (folder / "optimizer.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        examine(target, folder)


def test_a_drafter_that_cannot_be_loaded_is_a_finding(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(examined_folder(), tmp_path / "d"))
    data, state = read(folder)
    write(folder, data, {f"model.{name}": weight for name, weight in state.items()})
    found = examine("smollm2", folder)
    live_check(found, 20.0, "bf16", ["Hello."])
    assert codes(found) == {"load-refused"} and not found.healthy and not found.live["ran"]


def test_the_alarm_speaks_once_and_of_chance_only() -> None:
    wrong = Round(drafted=7, accepted=0, committed=1)
    right = Round(drafted=7, accepted=2, committed=3)
    plain = Round(drafted=0, accepted=0, committed=1)
    alarm = Alarm()
    assert alarm.add([wrong] * (ENOUGH - 1) + [plain] * 99) is None
    assert "contributes nothing" in str(alarm.add([wrong]))
    assert alarm.add([wrong] * 99) is None and alarm.message
    good = Alarm()
    for _ in range(40):
        assert good.add([wrong] * 4 + [right]) is None  # a fifth is accepted: not chance


def test_live_check_raises_the_alarm_for_a_drafter_that_knows_nothing(tmp_path: Path) -> None:
    """Well-formed, trained-looking, made for this target: only decoding shows that it is of no use."""
    folder = contrary_folder(tmp_path)
    found = examine("smollm2", folder)
    assert found.healthy
    live_check(found, 20.0, "bf16", ["Write a haiku about rain.", "Name three rivers of Europe."])
    assert codes(found) == {"no-use"} and not found.healthy
    assert found.live["rounds"] >= ENOUGH


def contrary_folder(tmp_path: Path) -> Path:
    """The packaged drafter, turned round: it drafts what it thinks least of."""
    folder = Path(shutil.copytree(examined_folder(), tmp_path / "d"))
    data, state = read(folder)
    state["norm.weight"] = -state["norm.weight"]
    write(folder, data, state)
    return folder


def test_generate_warns_of_a_drafter_that_knows_nothing(tmp_path: Path) -> None:
    def run(drafter: str) -> tuple[str, str, Any]:
        out = str(tmp_path / "o.json")
        call = ["generate", "Name three rivers.", "--drafter", drafter, "--max-new-tokens", "40"]
        call += ["--dtype", "fp32"]
        result = CliRunner().invoke(app, [*call, "--json", out])
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr, json.loads(Path(out).read_text())["warning"]

    text, warned, kept = run(str(contrary_folder(tmp_path)))
    assert "contributes nothing" in warned and "contributes nothing" in kept
    same_text, silent, none = run("default")
    assert same_text == text and "contributes" not in silent and none is None
