"""What is no checkpoint is named for what it is, with what to do."""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import lzma
import pickle
import random
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from public_models import gla, rwkv6, write_bin, write_pth, write_safetensors

from penstock import PenstockError, RangeError
from penstock.models import load

W = rwkv6.draw()
ORIGINAL = "Pass the checkpoint that it was made from"
ALONE = r"Save the weights alone: torch\.save\(model\.state_dict\(\), FILE\)"
ZERO = r"python zero_to_fp32\.py FOLDER OUTPUT"
UNPACK = "Unpack it, and pass what is in it"


def optimizer() -> torch.optim.AdamW:
    x = torch.nn.Parameter(torch.ones(3))
    found = torch.optim.AdamW([x])
    x.sum().backward()
    found.step()
    return found


def zipped(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, "content")

    return write


def tarred(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.addfile(tarfile.TarInfo("model/config.json"), io.BytesIO())


def script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), path)


def content(x: object, **options: bool) -> Callable[[Path], None]:
    return lambda path: torch.save(x, path, **options)


def beginning(x: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(x + bytes(600))


SCHEDULER = torch.optim.lr_scheduler.LambdaLR(optimizer(), lambda step: 1.0)
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "optimizer.pt": (
        content(optimizer().state_dict()),
        "the state of an optimizer, which has no weights. Pass the file of the model beside",
    ),
    "scheduler.pt": (content({"last_epoch": 3, "_last_lr": [0.1], "base_lrs": [0.1]}), "the state of a training, which has no weights"),
    "scaler.pt": (content({"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 0}), "the state of a training, which has no weights"),
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": (
        content({"optimizer_state_dict": {"fp32_flat_groups": [torch.zeros(3)]}, "ds_version": "0.17"}),
        f"the state of an optimizer, .* {ZERO}",
    ),
    "zero_pp_rank_0_mp_rank_00_model_states.pt": (
        content({"module": {name: torch.zeros(0) for name in W}, "ds_version": "0.17"}),
        f"weights without values, as of ZeRO stage 3.* {ZERO}",
    ),
    "shard of FSDP.pth": (content({"_fsdp_wrapped_module._flat_param": torch.zeros(9)}), "FSDP has flattened.*FULL_STATE_DICT"),
    "converted.pth": (content({**W, "_strategy": "cpu fp32", "_version": "0.7", "_rescale_layer": 6}), f"by the package rwkv.* {ORIGINAL}"),
    "objects.ckpt": (content({"state_dict": W, "hparams": argparse.Namespace(a=1)}), rf"Python \(argparse\.Namespace\)\..* {ALONE}"),
    "objects.pth": (
        content({"state_dict": W, "hparams": argparse.Namespace(a=1)}, _use_new_zipfile_serialization=False),
        rf"Python \(argparse\.Namespace\)\. They are not run\. {ALONE}",
    ),
    "whole.pt": (content(torch.nn.Linear(2, 2)), rf"objects of Python \(torch\.nn\.modules\.linear\.Linear\)\..* {ALONE}"),
    "script.pt": (script, f"a program of TorchScript. {ALONE}"),
    "folder.zip": (zipped("m/config.json", "m/model.safetensors"), f"a zip archive of 'm/config.json, m/model.safetensors'. {UNPACK}"),
    "weights.npz": (zipped("a.npy", "b.npy"), f"arrays of NumPy. {ORIGINAL}"),
    "folder.tar": (tarred, f"a tar archive. {UNPACK}"),
    "small.pth.gz": (lambda path: path.write_bytes(gzip.compress(b"x" * 99)), f"compressed by gzip. {UNPACK}"),
    "small.pth.bz2": (lambda path: path.write_bytes(bz2.compress(b"x" * 99)), f"compressed by bzip2. {UNPACK}"),
    "small.pth.xz": (lambda path: path.write_bytes(lzma.compress(b"x" * 99)), f"compressed by xz. {UNPACK}"),
    "small.pth.zst": (beginning(b"\x28\xb5\x2f\xfd"), f"compressed by zstd. {UNPACK}"),
    "small.7z": (beginning(b"7z\xbc\xaf\x27\x1c"), f"a 7z archive. {UNPACK}"),
    "rwkv.cpp.bin": (beginning(b"fmgg\x65\x00\x00\x00"), f"a file of rwkv.cpp. {ORIGINAL}"),
    "model.onnx": (beginning(b"\x08\x07\x12\x07pytorch"), f"a program of ONNX. {ORIGINAL}"),
    "model.h5": (beginning(b"\x89HDF\r\n\x1a\n"), f"an HDF5 file, as of Keras. {ORIGINAL}"),
    "flax_model.msgpack": (beginning(b"\x81"), f"a file of Flax. {ORIGINAL}"),
    "config.json": (lambda path: path.write_text("{}"), "a file of JSON, which has no weights. Pass its folder"),
    "model-00002-of-00003.safetensors": (
        lambda path: path.write_bytes(b""),
        r"one of 3 files of a checkpoint\. Pass its folder or model\.safetensors\.index\.json, which lists all",
    ),
    "pytorch_model-00001-of-00002.bin": (
        content(W),
        r"one of 2 files of a checkpoint\. Pass its folder or pytorch_model\.bin\.index\.json",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_checkpoints(name: str, tmp_path: Path) -> None:
    write, message = FILES[name]
    write(tmp_path / name)
    with pytest.raises(RangeError, match=rf"^load: path must be a checkpoint, got '.*{name}', .*{message}") as caught:
        load(tmp_path / name)
    assert str(caught.value).isprintable()
    base = write_pth(W, tmp_path)
    with pytest.raises(RangeError, match=r"^load: (adapter|state) must be a checkpoint, got "):
        load(base, adapter=tmp_path / name) if "json" in name else load(base, state=tmp_path / name)


def fsdp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": W}, checkpoint_id=folder, no_dist=True)


def shards(folder: Path) -> None:
    write_bin(gla.draw(gla.config()), gla.config(), folder, shards=3)
    (folder / "pytorch_model.bin.index.json").unlink()


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shards": (
        lambda folder: (fsdp(folder), (folder / ".metadata").unlink()),
        r"a folder of torch\.distributed\.checkpoint without a model's \.metadata, which is written last\. Pass a checkpoint that was",
    ),
    "shards of an optimizer": (lambda folder: fsdp(folder / "optimizer_0"), r"a folder of .*checkpoint in optimizer_0 without a model's"),
    "DeepSpeed": (lambda folder: (folder / "zero_to_fp32.py").write_text(""), f"a folder of DeepSpeed. .*{ZERO}"),
    "DeepSpeed's step": (
        lambda folder: [(folder / f"mp_rank_00_{one}_states.pt").write_bytes(b"") for one in ("model", "optim")],
        f"a folder of DeepSpeed. .*{ZERO}",
    ),
    "adapter": (
        lambda folder: [(folder / one).write_text("{}") for one in ("adapter_config.json", "adapter_model.bin", "optimizer.pt")],
        "a folder with an adapter of PEFT. Pass the base model as path, and this folder as adapter",
    ),
    "files without an index": (shards, r"a folder with 3 of 3 files, and no pytorch_model\.bin\.index\.json\. Download all files"),
    "GGUF": (lambda folder: (folder / "small.Q4_K.gguf").write_bytes(b"GGUF"), r"a folder with small\.Q4_K\.gguf\. Pass the file itself"),
    "ONNX": (lambda folder: (folder / "model.onnx").write_bytes(b""), rf"a folder with model\.onnx\. {ORIGINAL}"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_no_checkpoints(name: str, tmp_path: Path) -> None:
    write, message = FOLDERS[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    with pytest.raises(RangeError, match=rf"^load: path must be a checkpoint, got '{folder}', {message}"):
        load(folder)
    write_safetensors(gla.draw(gla.config()), gla.config(), folder)  # beside a checkpoint they are no harm
    load(folder)


def test_a_merged_checkpoint_of_torch_distributed_loads(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    fsdp(tmp_path / "shards")
    dcp_to_torch_save(tmp_path / "shards", tmp_path / "merged.pth")
    for path in (tmp_path / "merged.pth", tmp_path / "shards"):
        assert torch.equal(load(path).head.weight, W["head.weight"])


class Dangerous:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_damaged_parts_of_ranks_are_refused_and_run_no_code(tmp_path: Path) -> None:
    draw = random.Random(3)
    fsdp(tmp_path / "shards")
    for file in sorted((tmp_path / "shards").iterdir()):
        whole = file.read_bytes()
        for _ in range(8):
            at = draw.randrange(len(whole) + 1)
            file.write_bytes(whole[:at] + draw.randbytes(3) + whole[at + 3 :])
            with suppress(PenstockError):
                load(tmp_path / "shards")
        file.write_bytes(whole[:-9])
        with pytest.raises(RangeError, match=r"load: path must be a checkpoint, got '.*shards', which torch\.distributed\.checkpoint"):
            load(tmp_path / "shards")
        file.write_bytes(whole)
    (tmp_path / "shards" / ".metadata").write_bytes(pickle.dumps(Dangerous(tmp_path / "written")))
    with pytest.raises(RangeError, match="is not allowed in it"):
        load(tmp_path / "shards")
    assert not (tmp_path / "written").exists()


def test_names_of_web_rwkv(tmp_path: Path) -> None:
    w = {name.replace("time_maa", "time_mix").replace("time_faaaa", "time_first"): x for name, x in W.items()}
    with pytest.raises(RangeError, match="got RWKV-6 with the names of web-rwkv, which transposes weights"):
        load(write_pth(w, tmp_path))


def test_damaged_foreign_files_are_refused(tmp_path: Path) -> None:
    """No other exception reaches the caller."""
    draw = random.Random(3)
    for name, (write, _) in FILES.items():
        write(tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        for _ in range(10):
            at = draw.randrange(len(whole) + 1)
            (tmp_path / name).unlink()
            (tmp_path / name).write_bytes(whole[:at] + draw.randbytes(3) + whole[at + 3 :])
            with suppress(PenstockError):
                load(tmp_path / name)
