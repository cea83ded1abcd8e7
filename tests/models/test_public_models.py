"""The literal formulas of tests/support/public_models against other projects that compute the same models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formulas import error
from public_models import Weights, delta, gla, mamba2, retnet, rwkv5, rwkv6, rwkv7, tokens
from sampling import every
from torch import Tensor

from penstock.models import CausalLM, load, save
from penstock.models import mamba2 as mamba2_config
from penstock.models import rwkv6 as rwkv6_config

IDS = tokens(20, 13)
OF_THE_RWKV_PACKAGE = """
import os, sys
os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": "1"}
import torch
from rwkv.model import RWKV
model, folder = sys.argv[1], os.path.dirname(sys.argv[1])
with torch.no_grad():
    logits = RWKV(model=model, strategy="cpu fp32").forward(torch.load(f"{folder}/ids.pt").tolist(), None, full_output=True)[0]
torch.save(logits, f"{folder}/logits.pt")
"""


def of_the_rwkv_package(w: Weights, folder: Path) -> Tensor:
    """Logits of all tokens by the package ``rwkv``, which reads a file."""
    os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    model = pytest.importorskip("rwkv.model")
    torch.save(w, folder / "small.pth")
    loaded = model.RWKV(model=str(folder / "small"), strategy="cpu fp32", verbose=False)
    with torch.no_grad():
        return loaded.forward(IDS.tolist(), None, full_output=True)[0]


@pytest.mark.parametrize("version", every(3, rwkv5.VERSIONS))
def test_rwkv5_equals_the_rwkv_package(version: str, tmp_path: Path) -> None:
    w = rwkv5.draw(version)
    assert error(of_the_rwkv_package(w, tmp_path), rwkv5.logits(w, IDS)) < 1e-5


@pytest.mark.parametrize("tuned", [False, True])
def test_rwkv6_equals_the_rwkv_package(tuned: bool, tmp_path: Path) -> None:
    w = rwkv6.with_time_state(rwkv6.draw()) if tuned else rwkv6.draw()
    assert error(of_the_rwkv_package(w, tmp_path), rwkv6.logits(w, IDS)) < 1e-5


@pytest.mark.parametrize(("first", "deep"), [(False, 0), (True, 0), (False, 32)])
def test_rwkv7_equals_the_rwkv_package(first: bool, deep: int, tmp_path: Path) -> None:
    """In a process of its own: the package chooses the version as it is imported. Its matrices of DeepEmbed have 32 rows."""
    pytest.importorskip("rwkv.model")
    w = rwkv7.draw(first=first, deep=deep)
    torch.save(w, tmp_path / "theirs.pth")
    if not first:  # also a file that we have written
        save(load(tmp_path / "theirs.pth"), tmp_path / "ours.pth", "blinkdl")
    torch.save(IDS, tmp_path / "ids.pt")
    path = tmp_path / ("theirs.pth" if first else "ours.pth")
    chosen = os.environ | {"RWKV_DE_VERSION": "1" if deep else "0"}
    subprocess.run([sys.executable, "-c", OF_THE_RWKV_PACKAGE, path.with_suffix("")], check=True, capture_output=True, env=chosen)
    assert error(torch.load(tmp_path / "logits.pt"), rwkv7.logits(w, IDS)) < 1e-5


def test_rwkv6_in_two_layouts() -> None:
    w = rwkv6.draw()
    assert error(rwkv6.fla_logits(rwkv6.fla_names(w), IDS, 1e-5, 64e-5), rwkv6.logits(w, IDS)) < 1e-12


@pytest.mark.parametrize("changes", [{}, {"groups": 1, "eps": 1e-3}])
def test_mamba2_equals_transformers(changes: dict) -> None:
    transformers = pytest.importorskip("transformers")
    config = mamba2.config(**changes) | {"use_bias": bool(changes)}
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**config)).eval()
    w = mamba2.draw(config)
    model.load_state_dict(w)
    with torch.no_grad():
        assert error(model(IDS[None], use_cache=False).logits[0], mamba2.logits(w, config, IDS)) < 1e-5


@torch.no_grad()
def test_what_we_save_other_projects_load(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = CausalLM(rwkv6_config(vocab_size=13, hidden_size=16, num_layers=2, head_size=8))
    for x in model.parameters():
        x.add_(torch.randn_like(x) * 0.2)
    save(model, tmp_path / "ours.pth", "blinkdl")
    assert error(of_the_rwkv_package(torch.load(tmp_path / "ours.pth", weights_only=True), tmp_path), model(IDS[None]).logits[0]) < 1e-5

    transformers = pytest.importorskip("transformers")
    for tie in (False, True):
        ours = CausalLM(mamba2_config(vocab_size=13, hidden_size=16, num_layers=2, head_dim=8, state_size=8, tie_embeddings=tie))
        save(ours, tmp_path / f"hf{tie}", "hf")
        theirs, info = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path / f"hf{tie}", output_loading_info=True)
        assert not any(info.values()), info
        assert error(theirs(IDS[None], use_cache=False).logits[0], ours(IDS[None]).logits[0]) < 1e-5
        theirs.save_pretrained(tmp_path / f"theirs{tie}")
        again = load(tmp_path / f"theirs{tie}")
        assert again.config == ours.config
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in ours.state_dict().items())


def test_formulas_depend_on_every_weight() -> None:
    """A weight that a formula ignores would not be tested."""
    models = {
        "rwkv6": (rwkv6.with_time_state(rwkv6.draw()), rwkv6.logits),
        "rwkv7": (rwkv7.with_time_state(rwkv7.draw()), rwkv7.logits),
        "rwkv7a": (rwkv7.draw(deep=3), rwkv7.logits),
        "rwkv7b": (rwkv7.draw(deep=3, attention=4), rwkv7.logits),
        "rwkv6 in fla": (rwkv6.draw_fla(), lambda w, ids: rwkv6.fla_logits(w, ids, 1e-5, 1e-5)),
        "mamba2": (mamba2.draw(mamba2.config()), lambda w, ids: mamba2.logits(w, mamba2.config(), ids)),
    } | {f"rwkv{version}": (rwkv5.draw(version), rwkv5.logits) for version in rwkv5.VERSIONS}
    for judge in (gla, retnet):
        for changes in ({}, {"use_short_conv": True, "num_kv_heads": 1}, {"attn": {"layers": [1], "num_heads": 4}}):
            config = judge.config(**changes)
            models[f"{config['model_type']} {changes}"] = judge.draw(config), lambda w, ids, j=judge, c=config: j.logits(w, c, ids)
    for changes in (
        {"model_type": "delta_net", "use_gate": True, "allow_neg_eigval": True},
        {"model_type": "gated_deltanet", "num_v_heads": 4, "output_gate_activation": "sigmoid"},
        {"model_type": "kda"},
        {"model_type": "kda", "lower_bound": -5.0},
    ):
        config = delta.config(changes["model_type"], **changes)
        models[str(changes)] = delta.draw(config), lambda w, ids, c=config: delta.logits(w, c, ids)
    for model, (w, logits) in models.items():
        leaves = {name: x.double().requires_grad_() for name, x in w.items()}
        logits(leaves, IDS[:5]).square().mean().backward()
        unused = [name for name, x in leaves.items() if x.grad is None or not x.grad.any()]
        assert not unused, (model, unused)
