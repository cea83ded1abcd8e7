"""What load refuses: tensors and configurations that contradict each other, and other architectures. Every message names what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from public_models import Weights, delta, gla, mamba2, retnet, rwkv5, rwkv6, rwkv7, write_bin, write_pth, write_safetensors

from penstock import InvalidArgument, PenstockError, RangeError, ShapeError
from penstock.models import CausalLM, load, save
from penstock.models import gla as gla_config

pytestmark = pytest.mark.sampled(file=True)


def without(w: Weights, name: str) -> Weights:
    return {one: x for one, x in w.items() if one != name}


def test_all_missing_unknown_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    w = without(rwkv6.draw(), "blocks.1.att.output.weight") | {"blocks.0.ffn.value.weight": torch.zeros(24, 41), "extra": torch.zeros(2)}
    with pytest.raises(InvalidArgument) as caught:
        load(write_pth(w, tmp_path))
    lines = str(caught.value).splitlines()
    damaged = "The file is damaged or of another model."
    assert sorted(lines) == sorted(
        [
            f"load: blocks.1.att.output.weight must be a tensor of shape [24, 24], got none. {damaged}",
            "load: blocks.0.ffn.value.weight must be of shape [24, 40], got [24, 41].",
            f"load: extra must be absent from BlinkDL's RWKV files, got a tensor of shape [2]. {damaged}",
        ]
    )


@pytest.mark.parametrize(
    "name", ["emb.weight", "head.weight", "blocks.0.ln0.weight", "blocks.1.att.time_maa_w2", "blocks.0.ffn.key.weight"]
)
def test_each_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    w = rwkv6.draw()
    with pytest.raises(RangeError, match=rf"^load: {re.escape(name)} must be a tensor of shape \[.*\], got none\."):
        load(write_pth(without(w, name), tmp_path))


@pytest.mark.parametrize("name", ["blocks.0.att.time_faaaa", "blocks.0.att.time_maa_w1", "blocks.0.ffn.key.weight"])
def test_a_misshapen_tensor_that_sizes_are_read_from_is_named_alone(name: str, tmp_path: Path) -> None:
    """Sizes are those of most layers."""
    w = rwkv6.draw(layers=3)
    shape = list(w[name].shape)
    wrong = [shape[0] + 1, *shape[1:]]
    with pytest.raises(ShapeError) as caught:
        load(write_pth(w | {name: torch.zeros(wrong)}, tmp_path))
    assert str(caught.value) == f"load: {name} must be of shape {shape}, got {wrong}."


OTHERS: dict[str, tuple[Weights, str]] = {
    "x060a": (rwkv6.draw() | {"blocks.0.att.gate_w1": torch.zeros(24, 4)}, "got RWKV-6 of another variant than x060 .*gate_w1"),
    "x060b": (rwkv6.draw() | {"blocks.0.att.time_maa_rkvw_w1": torch.zeros(24, 4)}, "got RWKV-6 of another variant than x060"),
    "rwkv7a of parts": (
        rwkv7.draw() | {"blocks.0.ffn.s_emb.weight": torch.zeros(13, 1024)},
        r"blocks.0.ffn.s1 must be a tensor of shape \[C,E\], got none",
    ),
    "rwkv7a, merged": (
        without(rwkv7.draw(deep=3), "blocks.1.ffn.s_emb_x.weight"),
        r"blocks.1.ffn.s_emb_x.weight must be a tensor of shape \[9, 16\], got none",
    ),
    "rwkv7b of parts": (
        rwkv7.draw(deep=3) | {"blocks.0.qkv.qq.weight": torch.zeros(256, 16)},
        r"blocks.0.qkv.k1 must be a tensor of shape \[C,R\], got none",
    ),
    "rwkv7b, merged": (
        without(rwkv7.draw(deep=3, attention=4), "blocks.1.qkv.v_emb_x.weight"),
        r"blocks.1.qkv.v_emb_x.weight must be a tensor of shape \[16, 16\], got none",
    ),
    "rwkv4": ({name: x for name, x in rwkv5.draw().items() if "ln_x" not in name}, "got RWKV-4 or older"),
    "no layers": ({"weight": torch.zeros(2)}, "path must be a checkpoint of a known format, got .* with weight. Known are"),
    "integers": (rwkv6.draw() | {"emb.weight": torch.zeros(13, 24, dtype=torch.int8)}, "emb.weight must be a tensor of floating point"),
    "not tensors": (rwkv6.draw() | {"_version": 0.7}, "_version must be a tensor of floating point numbers, got 0.7 of type float"),
    "a list": ([torch.zeros(2)], "path must be a checkpoint with a dict of tensors"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    content, message = OTHERS[name]
    with pytest.raises(InvalidArgument, match=message):
        load(write_pth(content, tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            gla.config(model_type="hgrn2"),
            "model_type in config.json must be gla, retnet, delta_net, gated_deltanet, kda, rwkv6 or rwkv7, got 'hgrn2'",
        ),
        (gla.config(attn={"layers": [2], "num_heads": 2}), "attn in config.json must be null or objects of layers, num_heads, .* below 2"),
        (gla.config(attn={"layers": [1], "heads": 2}), "attn in config.json must be null or objects"),
        (gla.config(attn={"layers": [1], "num_heads": 5}), "must be"),
        (gla.config(attn={"layers": [1], "num_heads": 4, "num_kv_heads": 3}), "num_kv_heads must be a divisor of num_heads = 4, got 3"),
        (
            gla.config(attn={"layers": [1], "num_heads": 4, "window_size": 0}),
            "window_size in config.json must be a whole number of at least 1",
        ),
        (gla.config(attn={"layers": [0, 1], "num_heads": 2}), "attn in config.json must be some of the layers, got all of them"),
        (gla.config(hidden_act="powlu"), "hidden_act in config.json must be swish, got 'powlu'"),
        (gla.config(feature_map="dpfp"), "feature_map must be None or one of"),
        (gla.config(use_gv=True), "use_gv in config.json must be False"),
    ],
)
def test_what_fla_has_and_we_have_not(config: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load(write_safetensors(gla.draw(gla.config()), config, tmp_path / "model"))


def test_what_mamba_has_and_we_have_not(tmp_path: Path) -> None:
    config = mamba2.config()
    own = mamba2.state_spaces_config(config)
    for n, (changes, message) in enumerate(
        {"attn_layer_idx": ([1], "of Mamba-2 layers only"), "ssm_cfg": ({"layer": "Mamba1"}, "ssm_cfg must be that of Mamba2")}.items()
    ):
        value, match = message
        with pytest.raises(RangeError, match=match):
            load(write_bin(mamba2.state_spaces_names(mamba2.draw(config)), own | {changes: value}, tmp_path / str(n)))
    first = {"backbone.embedding.weight": torch.zeros(5, 4), "backbone.layers.0.mixer.A_log": torch.zeros(8, 16)}
    with pytest.raises(RangeError, match="another one, perhaps Mamba-1"):
        load(write_bin(first, own, tmp_path / "first"))


FOLDERS = {
    "gla": (gla.draw(gla.config()), gla.config()),
    "hybrid": (gla.draw(gla.config(attn={"layers": [1], "num_heads": 4})), gla.config(attn={"layers": [1], "num_heads": 4})),
    "retnet": (retnet.draw(retnet.config()), retnet.config()),
    **{kind: (delta.draw(delta.config(kind)), delta.config(kind)) for kind in ("delta_net", "gated_deltanet", "kda")},
    "fla rwkv6": (rwkv6.draw_fla(), rwkv6.fla_config(rwkv6.draw_fla())),
    "fla rwkv7": (rwkv7.fla_names(rwkv7.draw()), rwkv7.fla_config(rwkv7.draw())),
    "hf rwkv6": (rwkv6.hf_names(rwkv6.draw()), rwkv6.hf_config(rwkv6.draw())),
    "mamba2": (mamba2.draw(mamba2.config()), mamba2.config()),
    "state-spaces": (mamba2.state_spaces_names(mamba2.draw(mamba2.config())), mamba2.state_spaces_config(mamba2.config())),
}


VALUES = (None, 0, -1, 3, 7.5, "text", [], {}, [1, 2], {"a": 1}, True)
SHAPES = ([], [0], [1], [5], [3, 0], [2, 3], [1, 2, 3], [1, 1, 1, 1])


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_any_value_in_config_json_loads_or_is_refused(name: str, every: bool, tmp_path: Path) -> None:
    """No other exception, and no model of wrong sizes."""
    w, config = FOLDERS[name]
    path = write_bin(w, config, tmp_path / "model")
    load(path)
    for n, key in enumerate(config):
        for value in VALUES if every else VALUES[n % 6 :: 6]:
            (path / "config.json").write_text(json.dumps(config | {key: value}))
            with suppress(PenstockError):
                assert load(path).embeddings.weight.shape == w[next(one for one in w if "embedding" in one)].shape, (key, value)


LAYERS, WIDTHS = {"num_hidden_layers", "n_layer"}, {"hidden_size", "d_model"}
SIZES = {"head_dim", "num_v_heads", "num_kv_heads", "expand_k", "expand_v", "state_size", "d_state"}
"""Sizes that other models than RWKV have in config.json beside one that shapes do not tell, such as the number of heads."""


@pytest.mark.parametrize("name", FOLDERS)
def test_sizes_in_config_json_are_those_of_the_tensors(name: str, tmp_path: Path) -> None:
    """Else a file without its last layers would be a smaller model, and weights would be those of other heads."""
    w, config = FOLDERS[name]
    path, parts = write_bin(w, config, tmp_path / "model"), config.get("ssm_cfg", {})
    told = (LAYERS | WIDTHS | (set() if "rwkv" in name else SIZES)) & {key for key, value in {**config, **parts}.items() if value}
    assert told & LAYERS
    assert told & WIDTHS
    for key in told:
        changed = config | ({key: config[key] * 2} if key in config else {"ssm_cfg": parts | {key: parts[key] * 2}})
        (path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(RangeError, match=rf"^load: {key} in config.json must be .*, as in the tensors.*, got "):
            load(path)
    last = max(int(found[1]) for one in w if (found := re.search(r"\.(\d+)\.", one)))
    write_bin({one: x for one, x in w.items() if f".{last}." not in one}, config, tmp_path / "cut")
    with pytest.raises(RangeError, match=r"^load: .* in config.json must be "):
        load(tmp_path / "cut")


@pytest.mark.parametrize(
    ("draw", "config"),
    [
        (gla.draw, gla.config(hidden_size=200, num_heads=3, expand_k=0.29, expand_v=0.555)),
        (gla.draw, gla.config(hidden_size=432, num_heads=4, expand_k=1.0, expand_v=101 / 48)),
        (delta.draw, delta.config("delta_net", hidden_size=100, num_heads=3, expand_k=0.58, expand_v=0.58)),
    ],
    ids=("gla", "gla, a third", "delta_net"),
)
def test_sizes_that_fla_rounds_down(draw: Callable, config: dict, tmp_path: Path) -> None:
    """The products are whole numbers less an error of rounding, or whole numbers that are less by 1."""
    load(write_bin(draw(config), config, tmp_path / "model"))


def test_sizes_that_are_no_numbers(tmp_path: Path) -> None:
    w, config = FOLDERS["gla"]
    path = write_bin(w, config, tmp_path / "model")
    for value in ("NaN", "Infinity", "1" + "0" * 400, "-1" + "0" * 400, "1e400"):
        (path / "config.json").write_text(json.dumps(config | {"expand_k": "here"}).replace('"here"', value))
        with pytest.raises(RangeError, match=r"^load: expand_k in config.json must be "):
            load(path)


def test_keys_of_other_models_in_config_json_are_ignored(tmp_path: Path) -> None:
    w, config = FOLDERS["gla"]
    assert load(write_bin(w, config | {"teacher.hidden_size": 4096, "teacher": {"hidden_size": 1}}, tmp_path / "model"))


@pytest.mark.parametrize("name", [*FOLDERS, "blinkdl rwkv5"])
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.slow), False])
def test_any_shape_is_refused(name: str, every: bool, tmp_path: Path) -> None:
    w, config = FOLDERS.get(name, (rwkv5.draw(), {}))
    path = write_bin(w, config, tmp_path / "model")
    for n, one in enumerate(list(w) if every else list(w)[::2]):
        for shape in SHAPES if every else SHAPES[n % 8 :: 8]:
            torch.save(w | {one: torch.zeros(shape)}, path / "pytorch_model.bin")
            with pytest.raises(PenstockError, match="must be "):
                load(path)


@pytest.mark.parametrize("number", ["9999999999", "0" * 9 + "7777", "0000000000000000099"])
def test_layers_that_cannot_be_there(number: str, tmp_path: Path) -> None:
    name = f"blocks.{number}.ln1.weight"
    with pytest.raises(RangeError, match=rf"{name} must be (a tensor of one of at most \d+ layers, got|absent from BlinkDL's)"):
        load(write_pth(rwkv6.draw() | {name: torch.zeros(24)}, tmp_path))


@pytest.mark.parametrize("name", ["blocks." + "9" * 300 + ".ln1.weight", "blocks.77", "blocks.\u0663.ln1.weight", "blocks.01.ln1.weight"])
def test_names_that_are_no_layers(name: str, tmp_path: Path) -> None:
    with pytest.raises(RangeError, match=f"^load: {name} must be absent from BlinkDL's RWKV files, got a tensor of shape"):
        load(write_pth(rwkv6.draw() | {name: torch.zeros(24)}, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": "many"},
        {"num_layers": 10**12},
        {"mixer": {"kind": "gla", "heads": 2}},
        {"mixer": {"kind": "other"}},
        {"mixer": None},
        {"mixer": [1, 2]},
        {"channel": "swiglu"},
        {"extra": 1},
        {"hidden_size": 2**31},
        {"hidden_size": 2**62},
        {"norm_eps": None},
        {"mixer": {"kind": "gla", "num_heads": 2, "norm_eps": "a"}},
        {"mixer": {"kind": "gla", "num_heads": 2, "expand_v": 1e300}},
        {"mixer": {"kind": "gla", "num_heads": 7}},
    ],
)
def test_our_own_configuration(change: dict, tmp_path: Path) -> None:
    save(CausalLM(gla_config(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2)), tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["model"] |= change
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(PenstockError, match=r"^load: "):
        load(tmp_path)
    del stored["model"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(PenstockError, match=r"^load: "):
        load(tmp_path)


def test_layers_of_one_kind_need_what_config_json_says(tmp_path: Path) -> None:
    """Where no layer has a tensor, config.json tells that it is missing."""
    config = gla.config(use_short_conv=True)
    w = gla.draw(config)
    for part in ("g_proj.weight", "g_norm_swish_gate.weight", "q_conv1d.weight"):
        path = write_safetensors({name: x for name, x in w.items() if part not in name}, config, tmp_path / part)
        with pytest.raises(PenstockError, match=rf"model\.layers\.0\.attn\.{part} must be a tensor of shape \[.*\], got none"):
            load(path)


@pytest.mark.parametrize("value", [[1], None, {}, "Infinity!", {"a": 1}, 5])
def test_objects_that_look_like_infinity(value: object, tmp_path: Path) -> None:
    config = gla.config(norm_eps={"__float__": value})
    with pytest.raises(RangeError, match=r"norm_eps in config\.json must be a number of at least 0\.0, got \{'__float__': "):
        load(write_safetensors(gla.draw(gla.config()), config, tmp_path / "model"))
