"""Loading and saving in every format, against the formulas of tests/support/public_models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from formulas import error
from public_models import gla, rwkv6, rwkv7, tokens, write_bin, write_pth, write_safetensors
from public_models.published import PUBLISHED, Published

from penstock.errors import MissingExtra
from penstock.models import load, save

pytestmark = pytest.mark.sampled(file=True)

IDS = tokens(64, 13)


@pytest.fixture(params=PUBLISHED)
def published(request: pytest.FixtureRequest) -> Published:
    return PUBLISHED[request.param]


@torch.no_grad()
def test_logits_equal_the_formulas_for_every_split(published: Published, tmp_path: Path) -> None:
    path, true = published.write(tmp_path), published.logits(IDS)
    model = load(path)
    assert error(model(IDS[None]).logits[0], true) < 1e-5
    assert error(load(path, dtype=torch.float64)(IDS[None]).logits[0], true) < 1e-10

    state, parts = None, []
    for piece in IDS.split([1, 5, 2, 30, 26]):
        logits, state = model(piece[None], state)
        parts.append(logits[0])
    assert error(torch.cat(parts), true) < 1e-5
    pool = model.initial_state(1)
    serial = torch.cat([model.advance(one.view(1, 1), pool)[0] for one in IDS])
    assert error(serial, true) < 1e-5


def test_saved_again_has_equal_bits(published: Published, tmp_path: Path) -> None:
    model = load(published.write(tmp_path))
    for format in ("penstock", *published.formats):
        path = tmp_path / "again" / (f"{format}.pth" if format == "blinkdl" else format)
        save(model, path, format)
        again = load(path)
        assert again.config == model.config, format
        ours, theirs = model.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(x, theirs[name]) and x.dtype == theirs[name].dtype for name, x in ours.items()), format


@torch.no_grad()
def test_rwkv7_of_one_layer(tmp_path: Path) -> None:
    """Its file does not tell the rank of layer 0's values, which nothing takes."""
    w = rwkv7.draw(1)
    model = load(write_pth(w, tmp_path))
    assert error(model(IDS[None]).logits[0], rwkv7.logits(w, IDS)) < 1e-5
    save(model, tmp_path / "again.pth", "blinkdl")
    assert load(tmp_path / "again.pth").config == model.config


@pytest.mark.parametrize("version", [rwkv6, rwkv7])
def test_blinkdls_names_in_safetensors(version: Any, tmp_path: Path) -> None:
    w = version.with_time_state(version.draw())
    model = load(write_pth(w, tmp_path))
    save(model, tmp_path / "ours.safetensors", "blinkdl")
    found = safetensors.torch.load_file(tmp_path / "ours.safetensors")
    assert found.keys() == w.keys()
    assert all(torch.equal(found[name].reshape(x.shape), x) for name, x in w.items())
    again = load(tmp_path / "ours.safetensors")
    assert again.config == model.config
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


def test_tuned_states_have_gradients(tmp_path: Path) -> None:
    w = rwkv6.with_time_state(rwkv6.draw())
    model = load(write_pth(w, tmp_path), dtype=torch.float64)
    model.loss(IDS[None, :-1], IDS[None, 1:]).backward()
    leaves = {name: x.double().requires_grad_(name.endswith("time_state")) for name, x in w.items()}
    torch.nn.functional.cross_entropy(rwkv6.logits(leaves, IDS[:-1]), IDS[1:]).backward()
    for n, layer in enumerate(model.layers):
        assert error(layer.mixer.time_state.grad, leaves[f"blocks.{n}.att.time_state"].grad.transpose(1, 2)) < 1e-10


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("write", [write_safetensors, write_bin, write_pth])
def test_weights_stay_mapped_from_the_files(write: Callable, tmp_path: Path) -> None:
    """No bytes are copied, and writing to a weight does not change the file."""
    if write is write_pth:
        path = write(rwkv6.draw(), tmp_path)
    else:
        path = write(gla.draw(gla.config()), gla.config(), tmp_path / "model", shards=2)
    model = load(path)
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert ranges
    for name, x in model.named_parameters():
        assert any(int(first, 16) <= x.data_ptr() < int(last, 16) for first, last in ranges), name
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with torch.no_grad():
        model.head.weight.fill_(1)
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_dtypes(tmp_path: Path) -> None:
    """As stored; a public file that mixes dtypes becomes a model of one."""
    w = {name: x.bfloat16() for name, x in rwkv6.draw().items()}
    mixed = w | {name: x.float() for name, x in w.items() if "time_decay" in name}
    for content, dtype, wanted in ((w, None, torch.bfloat16), (mixed, None, torch.bfloat16), (mixed, torch.float16, torch.float16)):
        model = load(write_pth(content, tmp_path), dtype=dtype)
        assert {x.dtype for x in model.parameters()} == {wanted}
        assert model(IDS[None]).logits.isfinite().all()
    model.layers[0].mixer.time_decay.data = model.layers[0].mixer.time_decay.data.float()
    save(model, tmp_path / "ours")
    assert {x.dtype for x in load(tmp_path / "ours").parameters()} == {torch.float16, torch.float32}, "our own stay as they are"


def test_converted_world_models_in_flas_layout(tmp_path: Path) -> None:
    """BlinkDL's eps of ln_x is not in their config.json."""
    w = rwkv6.draw(V=65536, C=8, n=4, F=16, layers=1)
    ids = tokens(10, 65536)
    model = load(write_safetensors(rwkv6.fla_names(w), rwkv6.fla_config(rwkv6.fla_names(w)), tmp_path / "world"))
    assert error(model(ids[None]).logits[0].detach(), rwkv6.logits(w, ids)) < 1e-5


def test_early_folders_of_fla(tmp_path: Path) -> None:
    """Two projections of the feed-forward layer are one tensor."""
    config = gla.config()
    w = gla.draw(config)
    early = {name: x for name, x in w.items() if "up_proj" not in name}
    for name in list(early):
        if "gate_proj" in name:
            early[name] = torch.cat([w[name], w[name.replace("gate_proj", "up_proj")]])
    model = load(write_bin(early, config, tmp_path / "early"))
    assert error(model(IDS[None]).logits[0].detach(), gla.logits(w, config, IDS)) < 1e-5


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of torch need no package."""
    file = write_pth(rwkv6.draw(), tmp_path)
    folder = write_safetensors(gla.draw(gla.config()), gla.config(), tmp_path / "model")
    for name in ("safetensors", "safetensors.torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    save(load(file), tmp_path / "again.pth", "blinkdl")
    with pytest.raises(MissingExtra, match=r"load: safetensors must be installed, got none. Run pip install -e '\.\[models\]'"):
        load(folder)
    with pytest.raises(MissingExtra, match="save: safetensors and numpy must be installed"):
        save(load(file), tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "safetensors", safetensors)
    monkeypatch.setitem(sys.modules, "safetensors.torch", safetensors.torch)
    monkeypatch.setitem(sys.modules, "numpy", None)  # safetensors imports it to write
    with pytest.raises(MissingExtra, match="save: safetensors and numpy must be installed"):
        save(load(file), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    monkeypatch.delitem(sys.modules, "penstock.models.huggingface", raising=False)
    with pytest.raises(MissingExtra, match=r"transformers must be installed, got none. Run pip install -e '\.\[transformers\]'"):
        importlib.import_module("penstock.models.huggingface")
