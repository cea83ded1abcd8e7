"""What load and save refuse of files, folders and paths, and what of them they take."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from public_models import gla, rwkv6, write_bin, write_pth, write_safetensors

from penstock import DtypeError, InvalidArgument, RangeError
from penstock.models import CausalLM, load, save
from penstock.models import gla as gla_config

pytestmark = pytest.mark.sampled(file=True)


@pytest.mark.parametrize("write", [write_safetensors, write_bin])
def test_damaged_folders(write: Callable, tmp_path: Path) -> None:
    config = gla.config()
    w = gla.draw(config)
    path = write(w, config, tmp_path / "a", shards=2)
    part = sorted(path.glob("*-00002-of-*"))[0]
    part.unlink()
    with pytest.raises(RangeError, match=f"path must be a checkpoint with all files of .*index.json, got no {part.name}"):
        load(path)
    del w["model.layers.1.attn.gk_proj.1.bias"]
    path = write(w, config, tmp_path / "b")
    with pytest.raises(RangeError, match=r"model\.layers\.1\.attn\.gk_proj\.1\.bias must be a tensor of shape \[12\], got none"):
        load(path)
    (path / "config.json").unlink()
    with pytest.raises(RangeError, match=r"path must be a checkpoint with its config.json, .* got no config.json in"):
        load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(RangeError, match=r"config.json must be a JSON file"):
        load(path)


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
@pytest.mark.parametrize("kept", [0, 5, 100, -40, -2000])
def test_files_that_are_cut_off(kind: str, kept: int, tmp_path: Path) -> None:
    if kind == "pth":
        file = path = write_pth(rwkv6.draw(), tmp_path)
    else:
        path = write_safetensors(gla.draw(gla.config()), gla.config(), tmp_path / "model")
        file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(RangeError, match=rf"load: path must be a checkpoint, got '{file.name}', which (torch|safetensors) cannot read: .+"):
        load(path)


class Payload:
    """Writes a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.path, "run")


@pytest.mark.parametrize("legacy", [False, True])
def test_nothing_in_a_file_is_run(legacy: bool, tmp_path: Path) -> None:
    content = rwkv6.draw() | {"payload": Payload(tmp_path / "written")}
    torch.save(content, tmp_path / "small.pth", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(
        RangeError, match=r"small\.pth', a file of torch with objects of Python \(\S*getattr\)\. They are not run\. Save the"
    ):
        load(tmp_path / "small.pth")
    (tmp_path / "small.pth").write_bytes(pickle.dumps(content))
    with pytest.raises(RangeError, match="path must be a checkpoint"):
        load(tmp_path / "small.pth")
    assert not (tmp_path / "written").exists()


def test_files_of_old_versions_of_torch(tmp_path: Path) -> None:
    """They cannot be mapped."""
    w = rwkv6.draw()
    torch.save(w, tmp_path / "small.pth", _use_new_zipfile_serialization=False)
    assert torch.equal(load(tmp_path / "small.pth").head.weight, w["head.weight"])


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(RangeError, match=r"path must be an existing file or folder, got '.*nothing'"):
        load(tmp_path / "nothing")
    with pytest.raises(RangeError, match=r"path must be a folder with model.safetensors or pytorch_model.bin .* got none of these"):
        load(tmp_path)
    for name in ("a.pth", "b.pth"):
        torch.save(rwkv6.draw(), tmp_path / name)
    with pytest.raises(RangeError, match=r"got a.pth, b.pth"):
        load(tmp_path)
    (tmp_path / "b.pth").unlink()
    assert load(tmp_path).config.num_layers == 2
    with pytest.raises(DtypeError, match="path must be a str or a Path, got 3 of type int"):
        load(3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"dtype must be float16, bfloat16, float32, float64 or None, got 'bfloat16'"):
        load(tmp_path, dtype="bfloat16")  # type: ignore[arg-type]
    index = {"weight_map": {"emb.weight": "../a.pth"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(RangeError, match=r"must be an index of files beside it, got '../a.pth'"):
        load(tmp_path)


def test_what_torch_and_the_system_raise_for_files(tmp_path: Path) -> None:
    """No error of theirs reaches the caller, and no advice to run what is in a file."""
    weights = rwkv6.draw()
    contents = {
        "a pickle": ({"x": Payload(tmp_path / "written")}, r"a file of torch with objects of Python \(\S*getattr\)\. They are not run"),
        "numbers as names": ({1: torch.zeros(2)}, "tensors have texts as names, got 1 of type int"),
        "a dict of another name": (
            {"ema": weights},
            "ema must be a tensor .* of type dict. Pass a file that has the tensors of a model alone",
        ),
        "float8": ({name: x.to(torch.float8_e4m3fn) for name, x in weights.items()}, "got torch.float8_e4m3fn. Quantised weights"),
        "sparse": (weights | {"emb.weight": weights["emb.weight"].to_sparse()}, "with all its values, got sparse values"),
        "meta": (weights | {"emb.weight": weights["emb.weight"].to("meta")}, "with all its values, got no values"),
        "expanded": (weights | {"emb.weight": torch.zeros(1, 1).expand(2**40, 24)}, r"got fewer for shape \[1099511627776, 24\]"),
        "control characters": (weights | {"a\nb": torch.zeros(2)}, r"whose tensors have printable names .* got 'a\\nb' in other.pth"),
        "surrogates": (weights | {"a\ud800": torch.zeros(2)}, r"whose tensors have printable names .* got 'a\\ud800' in other.pth"),
        "no name": (weights | {"": torch.zeros(2)}, "whose tensors have printable names .* got '' in other.pth"),
        "a long name": (weights | {"a" * 10**6: torch.zeros(2)}, "whose tensors have printable names .* got 'a{20,40}[.]{3}a{20,40}' in"),
    }
    for content, message in contents.values():
        torch.save(content, tmp_path / "other.pth")
        with pytest.raises(InvalidArgument, match=message) as caught:
            load(tmp_path / "other.pth")
        assert "weights_only" not in str(caught.value)
    with pytest.raises(RangeError, match=r"path must be a file or folder that can be read, got .*name too long"):
        load("a" * 5000)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text("[" * 100_000)
    with pytest.raises(RangeError, match=r"config\.json must be a JSON file, got maximum recursion"):
        load(tmp_path / "deep")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)])
def test_paths_that_are_no_files(make: Callable[[Path], object], tmp_path: Path) -> None:
    """They are not opened, which may never end."""
    make(tmp_path / "model.safetensors")
    with pytest.raises(RangeError, match=r"path must be an existing file or folder, got '.*/model\.safetensors'"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(RangeError, match=r"path must be a folder with .*, got model\.safetensors, which is not a file"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_are_no_names(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = CausalLM(gla_config(vocab_size=11, hidden_size=16, num_layers=2, num_heads=2))
    for call in (lambda: load(path), lambda: save(model, path)):
        with pytest.raises(RangeError, match=re.escape(f"path must be the name of a file or folder, got {path!r}")):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../a.bin", "", "..", "a\0b", "a\nb", "\ud800", "a" * 5000, 5, None, ["a"], {}])
def test_names_of_files_in_an_index(name: object, tmp_path: Path) -> None:
    path = write_bin(gla.draw(gla.config()), gla.config(), tmp_path / "model", shards=2)
    index = path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(RangeError, match=r"^load: pytorch_model\.bin\.index\.json must be an index of files beside it, got ") as caught:
        load(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_paths_may_have_any_characters(tmp_path: Path) -> None:
    folder = tmp_path / "mit Leerzeichen äöü 模型 😀 'quotes' $HOME *"
    for name, form in (("a b", "penstock"), ("ß.pth", "blinkdl")):
        save(load(write_pth(rwkv6.draw(), tmp_path)), folder / name, form)
        assert load(folder / name).config.num_layers == 2


def test_tensors_that_share_memory_in_a_file_do_not_share_it_in_the_model(tmp_path: Path) -> None:
    """A step of training would change both."""
    w = rwkv6.draw()
    shared = {name: w["blocks.0.ln1.weight"] if x.shape == (24,) else x for name, x in w.items()}
    model = load(write_pth(shared, tmp_path))
    with torch.no_grad():
        model.layers[0].mixer_norm.weight.fill_(7)
    assert torch.equal(model.layers[1].mixer_norm.weight, w["blocks.0.ln1.weight"])


@pytest.mark.parametrize("device", ["banana", 3.5, "cuda:999"])
def test_devices_that_torch_cannot_use(device: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="load: device must be"):
        load(tmp_path, device=device)  # type: ignore[arg-type]
