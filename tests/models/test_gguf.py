"""GGUF files with RWKV-6 and RWKV-7."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import error
from public_models import ggufs, rwkv6, rwkv7, tokens

from penstock import InvalidArgument, RangeError
from penstock.errors import MissingExtra
from penstock.models import load, save

pytestmark = pytest.mark.sampled(file=True)

IDS = tokens(20, 13)
MODELS = {
    "rwkv7": (rwkv7, rwkv7.draw(3)),
    "rwkv7 wide": (rwkv7, rwkv7.draw(3, 64, 4, first=True)),
    "rwkv7 of one layer": (rwkv7, rwkv7.draw(1)),
    "rwkv6": (rwkv6, rwkv6.draw(layers=3)),
    "rwkv6 wide": (rwkv6, rwkv6.draw(C=64, F=96, layers=2)),
}


FILES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in MODELS]
FILES += [("rwkv6", {"rescale_every": 2}), ("rwkv6", {"fused": False}), ("rwkv6 wide", {"rescale_every": 1})]


@pytest.mark.parametrize(("name", "options"), FILES)
@torch.no_grad()
def test_logits_equal_the_formulas(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    judge, w = MODELS[name]
    model = load(ggufs.write(w, tmp_path, **options))
    assert error(model(IDS[None]).logits[0], judge.logits(w, IDS)) < 1e-5
    assert model.config.rescale_every == options.get("rescale_every", 0)
    save(model, tmp_path / "again.pth", "blinkdl")
    theirs = torch.load(tmp_path / "again.pth", weights_only=True)
    unused = [f"blocks.0.att.v{n}" for n in range(3)]
    assert all(torch.equal(theirs[one].reshape(x.shape), x) for one, x in w.items() if one not in unused)


@pytest.mark.parametrize("name", ["rwkv7 wide", "rwkv6 wide"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
@torch.no_grad()
def test_types_of_weights(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    dtype, bound = {"F16": (torch.float16, 1e-2), "BF16": (torch.bfloat16, 0.1), "Q8_0": (torch.float32, 0.05)}[kind]
    judge, w = MODELS[name]
    path = ggufs.write(w, tmp_path, kind)
    assert {x.dtype for x in load(path).parameters()} == {dtype}
    model = load(path, dtype=torch.float32)
    assert error(model(IDS[None]).logits[0], judge.logits(w, IDS)) < bound
    if kind != "Q8_0":
        assert torch.equal(model.head.weight, w["head.weight"].to(dtype).float())
    else:  # blocks of 32 have a scale in float16
        # the rounding of a number and of 127 scales
        rest = (model.head.weight - w["head.weight"]).view(-1, 32).abs().amax(1)
        assert (rest <= w["head.weight"].view(-1, 32).abs().amax(1) / 127 * 0.57).all()


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    w = rwkv7.draw(2, 64, 4)
    path = ggufs.write(w, tmp_path)
    cases = {
        "another architecture": (
            ggufs.write(w, tmp_path / "a", architecture="llama"),
            "general.architecture of the file must be rwkv6 or rwkv7",
        ),
        "another type": (
            ggufs.write(w, tmp_path / "b", "Q4_0"),
            r"output.weight must be of type F32, F16, BF16, Q8_0, got Q4_0. Pass a file of",
        ),
    }
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:2000])
    cases["cut off"] = (tmp_path / "cut.gguf", "'cut.gguf', which gguf cannot read: .* It may be cut off")
    without = {name: x for name, x in w.items() if name != "blocks.1.att.output.weight"}
    cases["a missing tensor"] = (
        ggufs.write(without, tmp_path / "c"),
        r"blk\.1\.time_mix_output\.weight must be a tensor of shape .*, got none",
    )
    for name in ("block_count", "embedding_length"):
        message = rf"rwkv7\.{name} of the file must be \d+, as in the tensors, got 77"
        cases[name] = (ggufs.write(w, tmp_path / name, **{name: 77}), message)
    for file, message in cases.values():
        with pytest.raises(InvalidArgument, match=f"load: .*{message}"):
            load(file)
    with pytest.raises(
        RangeError, match=r"format must be one of penstock, blinkdl for this model, got 'gguf' \(GGUF of llama.cpp: it is only"
    ):
        save(load(path), tmp_path / "x", "gguf")
    with pytest.raises(RangeError, match=r"state must be a checkpoint, got .*a GGUF file"):
        load(path, state=path)
    monkeypatch.setitem(sys.modules, gguf.__name__, None)
    with pytest.raises(MissingExtra, match=r"load: gguf must be installed, got none. Run pip install -e '\.\[gguf\]'"):
        load(path)
