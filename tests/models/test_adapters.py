"""Files beside a base model: tuned initial states, and adapters, against their formulas written out element by element."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import model_of
from formulas import error
from public_models import Draw, Weights, read_all, rewritten, rwkv5, rwkv6, rwkv7, tokens, write_pth, write_safetensors
from public_models.published import PUBLISHED
from torch import Tensor, nn

from penstock import InvalidArgument, RangeError
from penstock.engine import Engine, SamplingParams
from penstock.models import load, load_adapter, load_tuned_state, save
from penstock.models.checkpoints.adapters import LowRank

pytestmark = pytest.mark.sampled(file=True)

IDS = tokens(9, 13)
SIZES = {"C": 24, "F": 40, "layers": 2}
MAPS = [f"blocks.{i}.{one}" for i in range(2) for one in ("att.key", "att.output", "ffn.key", "ffn.value")]


def states(w: Weights, version: Any = rwkv6) -> Weights:
    return {name: x for name, x in version.with_time_state(w).items() if name.endswith("time_state")}


# Each kind: the tensors for a map NAME with W [out,in], and the weight [out,in] that they make, one element at a time.


def lora(random: Draw, out: int, inner: int) -> Weights:
    return {"lora_A": random(3, inner), "lora_B": random(out, 3)}


def with_lora(W: Tensor, parts: Weights, o: int, i: int, scale: float = 5 / 3) -> Tensor:
    return W[o, i] + scale * sum(parts["lora_B"][o, k] * parts["lora_A"][k, i] for k in range(3))


def with_bone_of_rows(W: Tensor, parts: Weights, o: int, i: int) -> Tensor:
    """D [out/r,r,r]: block (a, b) becomes W + W D_a + D_a."""
    D = parts["bone"]
    r = D.shape[-1]
    a, b = o // r, i // r
    return W[o, i] + sum(W[o, b * r + k] * D[a, k, i - b * r] for k in range(r)) + D[a, o - a * r, i - b * r]


def with_bone_of_columns(W: Tensor, parts: Weights, o: int, i: int) -> Tensor:
    """D [in/r,r,r]: block (a, b) becomes W + W D_b + D_b."""
    (D,) = parts.values()
    r = D.shape[-1]
    a, b = o // r, i // r
    return W[o, i] + sum(W[o, b * r + k] * D[b, k, i - b * r] for k in range(r)) + D[b, o - a * r, i - b * r]


def with_flat_bone(W: Tensor, parts: Weights, o: int, i: int) -> Tensor:
    return with_bone_of_rows(W, {"bone": torch.stack(parts["bone"].split(parts["bone"].shape[1]))}, o, i)


def with_shards(W: Tensor, parts: Weights, o: int, i: int) -> Tensor:
    """D [r,m]: column i gets row i mod r of D, repeated up to out elements."""
    (D,) = parts.values()
    return W[o, i] + D[i % D.shape[0], o % D.shape[1]]


KINDS: dict[str, tuple[Callable[[Draw, int, int], Weights], Callable[..., Tensor], dict]] = {
    "LoRA": (lora, with_lora, {"adapter_alpha": 5}),
    "Bone of columns": (lambda draw, out, inner: {"bone": draw(inner // 4, 4, 4)}, with_bone_of_columns, {}),
    "Bone of rows": (lambda draw, out, inner: {"bone": draw(out // 4, 4, 4)}, with_bone_of_rows, {}),
    "Bone with two axes": (lambda draw, out, inner: {"bone": draw(out, 4)}, with_flat_bone, {}),
    "DiSHA, bat": (lambda draw, out, inner: {"disha": draw(inner // 8, 8, 8)}, with_bone_of_columns, {}),
    "DiSHA": (lambda draw, out, inner: {"disha": draw(8, out)}, with_shards, {}),
    "DiSHA with a rest": (lambda draw, out, inner: {"disha": draw(7, out)}, with_shards, {}),
}


def adapted(w: Weights, kind: str, maps: list[str] = MAPS) -> tuple[Weights, Weights]:
    """The tensors of an adapter, and the weights of the adapted model, in float64."""
    make, formula, _ = KINDS[kind]
    random, adapter, merged = Draw(5), {}, dict(w)
    for name in maps:
        W = w[f"{name}.weight"].double()
        parts = make(random, *W.shape)
        adapter |= {f"{name}.{part}": x for part, x in parts.items()}
        exact = {part: x.double() for part, x in parts.items()}
        merged[f"{name}.weight"] = torch.stack([torch.stack([formula(W, exact, o, i) for i in range(W.shape[1])]) for o in range(len(W))])
    return adapter, merged


def beside(tensors: object, folder: Path, name: str = "rwkv-9.pth") -> Path:
    torch.save(tensors, folder / name)
    return folder / name


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_rwkv_peft_equal_the_formulas(kind: str, tmp_path: Path) -> None:
    w = rwkv6.draw()
    adapter, merged = adapted(w, kind)
    true = rwkv6.logits(merged, IDS)
    assert error(rwkv6.logits(w, IDS), true) > 0.05
    path, file = write_pth(w, tmp_path), beside(adapter, tmp_path)
    model = load(path, adapter=file, **KINDS[kind][2])
    assert error(model(IDS[None]).logits[0], true) < 1e-5
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    half = {name: x.bfloat16() for name, x in w.items()}
    merged = adapted(half, kind)[1]
    model = load(write_pth(half, tmp_path), adapter=file, dtype=torch.float32, **KINDS[kind][2])
    assert error(model(IDS[None]).logits[0], rwkv6.logits(merged, IDS)) < 1e-5, "merged weights are not rounded to the dtype of the base"


def base_of(w: Weights, format: str, folder: Path) -> Path:
    """The base model as a checkpoint of a format."""
    base = folder / "base"
    save(load(write_pth(w, folder)), base, format)
    return base


FORMATS = ["blinkdl", "hf", "fla", "penstock"]


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
def test_files_beside_a_base_model_of_any_format(format: str, tmp_path: Path) -> None:
    """The names are BlinkDL's, whatever the format of the base model; trainers put their own before them."""
    w = rwkv6.draw()
    base = base_of(w, format, tmp_path)
    adapter, merged = adapted(w, "LoRA")
    adapter |= {"blocks.1.ln2.weight": w["blocks.1.ln2.weight"] * 2, "blocks.1.att.time_decay": w["blocks.1.att.time_decay"] + 1}
    merged |= {name: x for name, x in adapter.items() if name in w}
    tuned = states(w)
    trained = {f"model.{name}": x for name, x in adapter.items()} | {"step": torch.tensor(7)}
    files = {"adapter": beside(trained, tmp_path), "adapter_alpha": 5}
    assert error(load(base, **files)(IDS[None]).logits[0], rwkv6.logits(merged, IDS)) < 1e-5
    if format == "fla":  # its eps of group norms may not be BlinkDL's
        return
    files |= {"state": beside({f"_forward_module.{name}": x for name, x in tuned.items()}, tmp_path, "state.pth")}
    model = load(base, **files)
    assert error(model(IDS[None]).logits[0], rwkv6.logits(merged | tuned, IDS)) < 1e-5
    save(model, tmp_path / "again", "blinkdl")
    assert error(rwkv6.logits(torch.load(tmp_path / "again"), IDS), model(IDS[None]).logits[0]) < 1e-5


@torch.no_grad()
def test_pissa_replaces_its_initial_product(tmp_path: Path) -> None:
    w, random = rwkv6.draw(), Draw(5)
    path, adapter, initial, merged = write_pth(w, tmp_path), {}, {}, dict(w)
    for name in MAPS:
        out, inner = w[f"{name}.weight"].shape
        A, B, A0, B0 = random(3, inner), random(out, 3), random(3, inner), random(out, 3)
        adapter |= {f"{name}.lora_A": A, f"{name}.lora_B": B}
        initial |= {f"model.{name}.init_lora_A": A0, f"model.{name}.init_lora_B": B0}
        merged[f"{name}.weight"] = w[f"{name}.weight"].double() - B0.double() @ A0.double() + B.double() @ A.double()
    file, first = beside(adapter, tmp_path), beside(initial, tmp_path, "init_pissa.pth")
    model = load(path, adapter=file, adapter_init=first)
    assert error(model(IDS[None]).logits[0], rwkv6.logits(merged, IDS)) < 1e-5
    with pytest.raises(RangeError, match=r"load: adapter_alpha must be None for this adapter, got 3 of type int\. PiSSA has none"):
        load(path, adapter=file, adapter_init=first, adapter_alpha=3)
    del initial["model.blocks.0.att.key.init_lora_A"]
    with pytest.raises(RangeError, match=r"adapter_init must be a file with blocks\.0\.att\.key\.init_lora_A of shape \[3, 24\], got none"):
        load(path, adapter=file, adapter_init=beside(initial, tmp_path, "init_pissa.pth"))
    with pytest.raises(RangeError, match=r"path must be a checkpoint of a model, .*init_lora_B\)\. It belongs to adapter_init"):
        load(first)


PEFT: dict[str, tuple[dict, Callable[[Draw, int, int], Weights], Callable[..., Tensor]]] = {
    "LoRA": ({"peft_type": "LORA", "r": 3, "lora_alpha": 5}, lora, with_lora),
    "LoRA, divided by a root": (
        {"peft_type": "LORA", "lora_alpha": 6, "use_rslora": True},
        lora,
        lambda *given: with_lora(*given, scale=6 / 3**0.5),
    ),
    "MiSS": ({"peft_type": "MISS", "r": 5}, lambda draw, out, inner: {"miss_block": draw(5, out)}, with_shards),
    "MiSS, bat": (
        {"peft_type": "MISS", "init_weights": "bat"},
        lambda draw, out, inner: {"miss_block": draw(out // 2, 2, 2)},
        lambda W, parts, o, i: with_bone_of_rows(W, {"bone": parts["miss_block"]}, o, i),
    ),
    "MiSS, mini": ({"peft_type": "MISS", "init_weights": "mini"}, lambda draw, out, inner: {"miss_block": draw(2, 2)}, with_shards),
}


def write_peft(tensors: Weights, config: dict, folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    part = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight"}  # parts of tables have no .weight
    names = {name: re.sub(r"lora_[AB]$", lambda found: part[found[0]], name) for name in tensors}
    save_file({f"base_model.model.{names[name]}": x.contiguous() for name, x in tensors.items()}, folder / "adapter_model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.pt")
    return folder


@torch.no_grad()
@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "shared" not in name])
def test_adapters_of_peft_in_the_names_of_every_format(kind: str, name: str, tmp_path: Path) -> None:
    """What they change is what the formula makes of the tensors of the file."""
    path = PUBLISHED[name].write(tmp_path)
    w, (config, make, formula), random = read_all(path), PEFT[kind], Draw(7)
    maps = [one for one, x in w.items() if x.dim() == 2 and one.endswith(".weight") and re.search(r"(layers|blocks)\.1\.", one)]
    maps = [one for one in maps if all(size % 2 == 0 and size >= 5 for size in w[one].shape)][::2]
    assert maps
    adapter, merged = {}, dict(w)
    for one in maps:
        W, parts = w[one].double(), make(random, *w[one].shape)
        adapter |= {f"{one.removesuffix('.weight')}.{part}": x for part, x in parts.items()}
        exact = {part: x.double() for part, x in parts.items()}
        merged[one] = torch.stack([torch.stack([formula(W, exact, o, i) for i in range(W.shape[1])]) for o in range(len(W))]).float()
    norm = next(one for one in w if re.search(r"\.1\..*(norm|ln2)\.weight", one))
    adapter[norm] = merged[norm] = w[norm] * 2
    folder = write_peft(adapter, config, tmp_path / "adapter")
    wanted = load(rewritten(merged, path, tmp_path / "merged")).state_dict()
    for place in (folder, folder / "adapter_model.safetensors"):
        found = load(path, adapter=place).state_dict()
        for key, x in wanted.items():
            torch.testing.assert_close(found[key], x, rtol=1e-6, atol=1e-6)
    changed = [key for key, x in load(path).state_dict().items() if not torch.equal(x, found[key])]
    assert len(changed) >= len(maps) + 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["rwkv7a", "gla", "mamba2_grouped"])
def test_adapters_of_transformers_classes(name: str, tmp_path: Path) -> None:
    """The head is beside the model there, not in it. Embeddings are tables: their A is [r,V] and B [C,r]."""
    model, random, adapter, wanted = model_of(name), Draw(7), {}, {}
    save(model, tmp_path / "base")
    for key, part in model.named_modules():
        theirs, W = key if key == "head" else f"model.{key}", getattr(part, "weight", None)
        if key.startswith("layers.0.") or not isinstance(part, nn.Linear | nn.Embedding):
            continue
        table = isinstance(part, nn.Embedding)
        parts = lora(random, *(W.shape[::-1] if table else W.shape))
        adapter |= {f"{theirs}.{one.replace('lora', 'lora_embedding') if table else one}": x for one, x in parts.items()}
        product = 5 / 3 * parts["lora_B"].double() @ parts["lora_A"].double()
        wanted[f"{key}.weight"] = W + (product.T if table else product)
    assert {"head.weight", "embeddings.weight"} < wanted.keys()
    folder = write_peft(adapter, PEFT["LoRA"][0], tmp_path / "adapter")
    found = load(tmp_path / "base", adapter=folder).state_dict()
    for key, x in model.state_dict().items():
        torch.testing.assert_close(found[key].double(), wanted.get(key, x).double(), rtol=1e-6, atol=1e-6)
    whole = {"head.weight": wanted["head.weight"], **{key: x for key, x in adapter.items() if ".layers.1." in key}}
    found = load(tmp_path / "base", adapter=write_peft(whole, PEFT["LoRA"][0], tmp_path / "whole")).state_dict()
    assert error(found["head.weight"], wanted["head.weight"]) < 1e-6
    for key in [one.removesuffix(".weight") for one in wanted if one != "head.weight"][::2]:  # half of the tensors are those of the head
        pair = {one: x for one, x in adapter.items() if one.startswith((f"model.{key}.", "head."))}
        found = load(tmp_path / "base", adapter=write_peft(pair, PEFT["LoRA"][0], tmp_path / f"{key} and head")).state_dict()
        assert error(found["head.weight"], wanted["head.weight"]) < 1e-6
        assert error(found[f"{key}.weight"], wanted[f"{key}.weight"]) < 1e-6
    adapter["model.embeddings.lora_embedding_A"] = torch.zeros(5)
    with pytest.raises(RangeError, match="one with lora_A and lora_B of embeddings"):
        load(tmp_path / "base", adapter=write_peft(adapter, PEFT["LoRA"][0], tmp_path / "wrong"))


def test_an_adapter_of_tied_embeddings_is_refused(tmp_path: Path) -> None:
    save(model_of("mamba2"), tmp_path / "base")
    adapter = {"model.embeddings.lora_embedding_A": torch.zeros(3, 13), "model.embeddings.lora_embedding_B": torch.zeros(24, 3)}
    with pytest.raises(RangeError, match=r"adapter must be one of other weights than the embeddings, which are the weight of the head"):
        load(tmp_path / "base", adapter=write_peft(adapter, PEFT["LoRA"][0], tmp_path / "adapter"))


def test_adapters_that_are_not_understood_are_named(tmp_path: Path) -> None:
    w = rwkv6.draw()
    path, good = write_pth(w, tmp_path), adapted(w, "LoRA")[0]
    bone = adapted(w, "Bone of rows")[0]
    cases: dict[str, tuple[object, dict, str]] = {
        "no alpha": (good, {}, r"adapter_alpha must be given for a file of LoRA, which does not tell it, got None\. Pass adapter_alpha"),
        "alpha of another kind": (bone, {"adapter_alpha": 3}, r"adapter_alpha must be None for this adapter, got 3 .*LoRA and PiSSA"),
        "half": (
            {"blocks.0.att.key.lora_A": good["blocks.0.att.key.lora_A"]},
            {"adapter_alpha": 3},
            r"one with lora_A and lora_B of blocks",
        ),
        "another rank": (good | {"blocks.0.att.key.lora_B": torch.zeros(24, 2)}, {"adapter_alpha": 3}, r"got \[3, 24\] and \[24, 2\]"),
        "of another model": (
            {f"a.{n}.lora_A": torch.zeros(2, 2) for n in range(3)},
            {"adapter_alpha": 3},
            "must be one for this base model",
        ),
        "unknown": (
            good | {"blocks.0.att.time_x": torch.zeros(2)},
            {"adapter_alpha": 3},
            r"base model, got blocks\.0\.att\.time_x, and no",
        ),
        "misshapen": (good | {"ln_out.bias": torch.zeros(25)}, {"adapter_alpha": 3}, r"with ln_out\.bias of shape \[24\], got \[25\]"),
        "square": ({name: x for name, x in bone.items() if ".att." in name}, {}, "which a weight that is not square tells"),
        "both ways": (
            bone | {"blocks.0.ffn.key.bone": torch.zeros(6, 4, 4)},
            {},
            "all belong to rows of weights, or all to columns, got both",
        ),
        "a vector": ({"blocks.0.ln1.disha": torch.zeros(4, 24)}, {}, r"one whose blocks\.0\.ln1\.disha fits the base model, got \[4, 24\]"),
        "blocks": ({"blocks.0.ffn.key.disha": torch.zeros(3, 7, 7)}, {}, r"ffn\.key\.disha fits the base model, got \[3, 7, 7\]"),
        "nothing": ({"blocks.0.ffn.key.disha": torch.zeros(0, 7)}, {}, r"ffn\.key\.disha fits the base model, got \[0, 7\]"),
    }
    for content, options, message in cases.values():
        with pytest.raises(InvalidArgument, match=message):
            load(path, adapter=beside(content, tmp_path), **options)
    for config, message in (
        ({"peft_type": "BOFT"}, r"peft_type in adapter_config\.json must be one of LORA, MISS, got 'BOFT'\. Merge it by PEFT"),
        ({"peft_type": "LORA", "use_dora": True}, r"use_dora in adapter_config\.json must be False, got True"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "init_lora_weights in .* must be True or False or 'gaussian', got 'pissa'"),
        ({"peft_type": "LORA", "alpha_pattern": {"a": 2}}, "alpha_pattern in adapter_config.json must be"),
        ({"peft_type": "LORA", "lora_alpha": "8"}, "lora_alpha in adapter_config.json must be a number, got '8'"),
    ):
        folder = tmp_path / message[:9] / str(len(message))
        folder.parent.mkdir(exist_ok=True)
        with pytest.raises(InvalidArgument, match=message):
            load(path, adapter=write_peft(good, config, folder))
    with pytest.raises(RangeError, match=r"adapter_alpha must be None for this adapter, got 4 .*adapter_config\.json has what"):
        load(path, adapter=write_peft(good, PEFT["LoRA"][0], tmp_path / "peft"), adapter_alpha=4)
    with pytest.raises(RangeError, match="adapter must be given with adapter_alpha or adapter_init, got None"):
        load(path, adapter_alpha=4)
    with pytest.raises(RangeError, match=r"load: adapter must be an existing file or folder, got '.*/none'"):
        load(path, adapter=tmp_path / "none")
    for alone in (beside(good, tmp_path), tmp_path / "peft/adapter_model.safetensors"):
        with pytest.raises(
            RangeError, match=r"path must be a checkpoint of a model, got .* with an adapter \(.*\)\. Pass the base model as"
        ):
            load(alone)
    merged = {f"base_model.model.{name}": x for name, x in w.items()} | {"base_model.model.head.base_layer.weight": torch.zeros(1)}
    with pytest.raises(RangeError, match=r"with a model and an adapter of PEFT. Save what merge_and_unload"):
        load(write_pth(merged, tmp_path))


@pytest.mark.parametrize("version", [rwkv6, rwkv7])
@torch.no_grad()
def test_a_tuned_state_equals_the_merged_file(version: Any, tmp_path: Path) -> None:
    tuned = states(version.draw(), version)
    file = beside(tuned, tmp_path, "state.pth")
    for dtype in (torch.float32, torch.bfloat16):
        w = {name: x.to(dtype) for name, x in version.draw().items()}
        merged = load(beside(w | tuned, tmp_path, f"{dtype}.pth"))
        for base in (w, version.with_time_state(w, seed=9)):  # a state takes the place of another one
            model = load(write_pth(base, tmp_path), state=file)
            assert model.config == merged.config
            assert all(torch.equal(x, merged.state_dict()[name]) for name, x in model.state_dict().items())


def test_states_that_do_not_belong_to_the_model_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    w = rwkv6.draw()
    path, tuned = write_pth(w, tmp_path), states(w)
    first, second = tuned
    cases = {
        "missing": ({first: tuned[first]}, r"a file with blocks\.1\.att\.time_state of shape \[3, 8, 8\], got none"),
        "misshapen": (tuned | {second: torch.zeros(3, 8, 7)}, r"blocks\.1\.att\.time_state of shape \[3, 8, 8\], got \[3, 8, 7\]"),
        "of a deeper model": (tuned | {"blocks.2.att.time_state": tuned[first]}, r"this model alone, got blocks\.2\.att\.time_state"),
        "of all weights": (w | tuned, r"a file of tuned initial states of this model alone, got blocks\.0\.att\.gate\.weight"),
    }
    for content, message in cases.values():
        with pytest.raises(InvalidArgument, match=f"load: state must be .*{message}"):
            load(path, state=beside(content, tmp_path, "state.pth"))
    save_file(tuned, tmp_path / "state.st")
    with pytest.raises(RangeError, match=r"state must be a file of torch, .*Programs that write safetensors swap its axes or do not"):
        load(path, state=tmp_path / "state.st")
    file = beside(tuned, tmp_path, "state.pth")
    with pytest.raises(RangeError, match=r"got '.*state.pth' with tuned initial states alone. Pass the base model as path"):
        load(file)
    with pytest.raises(RangeError, match=r"state must be None for a base model of rwkv5, got .*RWKV-6 and RWKV-7 have tuned states"):
        load(write_pth(rwkv5.draw(), tmp_path), state=file)
    with pytest.raises(InvalidArgument, match="state must be a str or a Path, got 3"):
        load(path, state=3)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS)
def test_factors_of_a_lora_equal_merged_weights(format: str, tmp_path: Path) -> None:
    w = rwkv6.draw()
    base = base_of(w, format, tmp_path)
    file = beside(adapted(w, "LoRA")[0], tmp_path)
    plain, merged = load(base, dtype=torch.float64), load(base, adapter=file, adapter_alpha=5, dtype=torch.float64)
    found = load_adapter(file, base, adapter_alpha=5)
    wanted = merged.state_dict()
    changed = {name for name, x in plain.state_dict().items() if not torch.equal(x, wanted[name])}
    assert found.keys() == changed
    for name, x in plain.state_dict().items():
        if name in found:
            down, up = found[name]
            x = x + up.double() @ down.double()
        torch.testing.assert_close(x, wanted[name], rtol=1e-6, atol=1e-6)


def test_factors_of_pissa_and_peft_equal_merged_weights(tmp_path: Path) -> None:
    A, B, first_A, first_B = (torch.randn(3, 5), torch.randn(7, 3), torch.randn(3, 5), torch.randn(7, 3))
    W = torch.randn(7, 5)
    for one in (LowRank(A, B, 0.5), LowRank(A, B, 1.0, (first_A, first_B))):
        down, up = one.factors()
        torch.testing.assert_close(W + up @ down, one(W))


@pytest.mark.parametrize(("kind", "name"), [("DiSHA", "att.key"), ("Bone of rows", "ffn.value")])
def test_adapters_that_are_no_lora_of_linear_maps_have_to_be_merged(kind: str, name: str, tmp_path: Path) -> None:
    w = rwkv6.draw()
    path, file = write_pth(w, tmp_path), beside(adapted(w, kind, [f"blocks.0.{name}"])[0], tmp_path)
    with pytest.raises(RangeError, match=r"load: adapter must be a LoRA of linear maps, .* a change of layers.0.* Merge it"):
        load_adapter(file, path)
    lora = adapted(w, "LoRA")[0] | {"blocks.1.ln2.weight": w["blocks.1.ln2.weight"] * 2}
    with pytest.raises(RangeError, match=r"a change of layers.1.channel_norm.weight of another kind"):
        load_adapter(beside(lora, tmp_path), path, adapter_alpha=5)


@torch.no_grad()
def test_a_tuned_state_is_the_state_of_a_sequence(tmp_path: Path) -> None:
    w = rwkv6.draw()
    path, file = write_pth(w, tmp_path), beside(states(w), tmp_path, "state.pth")
    base, tuned, state = load(path), load(path, state=file), load_tuned_state(file, path)
    engine = Engine(base, slots=2, token_budget=128, states={"tuned": state})
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0)
    found = engine.generate([IDS.tolist()], params, tuning="tuned")[0].completions[0].logprobs
    assert found == Engine(tuned, slots=2, token_budget=128).generate([IDS.tolist()], params)[0].completions[0].logprobs
    assert found != engine.generate([IDS.tolist()], params)[0].completions[0].logprobs


@pytest.mark.parametrize("read", [load_adapter, load_tuned_state])
def test_sizes_of_the_base_model_are_checked(read: Callable, tmp_path: Path) -> None:
    w = rwkv6.draw()
    base = write_safetensors(rwkv6.hf_names(w), rwkv6.hf_config(w) | {"num_hidden_layers": 99}, tmp_path / "base")
    file = beside(states(w) if read is load_tuned_state else adapted(w, "LoRA")[0], tmp_path)
    with pytest.raises(RangeError, match=r"num_hidden_layers in config\.json must be 2, as in the tensors, got 99"):
        read(file, base)
