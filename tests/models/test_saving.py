"""What save writes and what it refuses: files that exist, places that cannot be written, other architectures."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from penstock import DtypeError, InvalidArgument, RangeError
from penstock.models import CausalLM, linear, load, save
from penstock.models import gla as gla_config
from penstock.models import rwkv6 as rwkv6_config
from penstock.models.checkpoints.archive import SUFFIXES
from penstock.models.checkpoints.writing import NOT_WRITTEN

pytestmark = pytest.mark.sampled(file=True)

SMALL = {"vocab_size": 11, "hidden_size": 16, "num_layers": 2}


@pytest.mark.parametrize("format", ["penstock", "fla", "blinkdl"])
def test_existing_files_stay_unless_asked(format: str, tmp_path: Path) -> None:
    one, other = (CausalLM(rwkv6_config(**SMALL, head_size=8)) for _ in range(2))
    path = tmp_path / "model"
    save(one, path, format)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(RangeError, match=r"save: path must be a (file that does not exist|folder without a model), got"):
        save(other, path, format)
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    loaded = load(path)
    save(other, path, format, overwrite=True)
    assert torch.equal(load(path).head.weight, other.head.weight)
    assert torch.equal(loaded.head.weight, one.head.weight), "a loaded model is mapped from its files"


def test_a_folder_keeps_its_other_files(tmp_path: Path) -> None:
    model = CausalLM(gla_config(**SMALL, num_heads=2))
    (tmp_path / "tokenizer.json").write_text("{}")
    save(model, tmp_path, shard_bytes=4000)
    parts = sorted(one.name for one in tmp_path.glob("*.safetensors"))
    assert len(parts) > 2
    assert torch.equal(load(tmp_path).head.weight, model.head.weight)
    assert torch.equal(load(tmp_path / "model.safetensors.index.json").head.weight, model.head.weight)
    save(model, tmp_path, overwrite=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(load(tmp_path / "model.safetensors").head.weight, model.head.weight)


@pytest.mark.parametrize(("name", "format"), [("mamba2", "penstock"), ("mamba2", "hf"), ("gla", "penstock"), ("gla", "fla")])
def test_a_head_that_has_come_to_differ_from_tied_embeddings_is_saved(name: str, format: str, tmp_path: Path) -> None:
    model, ids = model_of(name, tie_embeddings=True), torch.arange(10)[None]
    save(model, tmp_path / "tied", format)
    assert load(tmp_path / "tied").config.tie_embeddings
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    save(model, tmp_path / "equal", format)
    assert load(tmp_path / "equal").config.tie_embeddings
    with torch.no_grad():
        model.head.weight.mul_(2)
    save(model, tmp_path / "apart", format)
    again = load(tmp_path / "apart")
    assert not again.config.tie_embeddings
    assert torch.equal(again(ids).logits, model(ids).logits)


FORMATS = ["penstock", "fla", "hf", "blinkdl"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_models_and_layers_are_saved(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    wanted = {one: x.clone() for one, x in model.state_dict().items()}
    for n, layer in enumerate(model.layers):
        model.layers[n] = torch.compile(layer)
    model.layers[0]._orig_mod.mixer_norm = checkpoint_wrapper(model.layers[0]._orig_mod.mixer_norm)
    save(torch.compile(model), tmp_path / "model")
    again = load(tmp_path / "model").state_dict()
    assert again.keys() == wanted.keys()
    assert all(torch.equal(x, again[one]) for one, x in wanted.items())


@pytest.mark.parametrize("format", FORMATS)
def test_weights_that_share_memory(format: str, tmp_path: Path) -> None:
    model = CausalLM(rwkv6_config(**SMALL, head_size=8))
    model.head.weight = model.embeddings.weight
    model.layers[0].mixer.key.weight.data = model.layers[1].mixer.key.weight.data.T
    save(model, tmp_path / "model", format)
    again = load(tmp_path / "model").state_dict()
    assert all(torch.equal(x, again[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("format", FORMATS)
def test_models_with_other_weights_than_their_configuration_says(format: str, tmp_path: Path) -> None:
    """``load`` could not read the files, or weights would be lost."""

    def of_shape(model: CausalLM) -> None:
        model.layers[0].mixer.key.weight.data = torch.zeros(16, 17)

    def of_dtype(model: CausalLM) -> None:
        model.head.weight = torch.nn.Parameter(torch.zeros(11, 16, dtype=torch.int8), requires_grad=False)

    def missing(model: CausalLM) -> None:
        del model.layers[0].mixer.output

    def more(model: CausalLM) -> None:
        model.adapter = torch.nn.Linear(2, 2, bias=False)

    for change, message in {
        of_shape: r"one whose layers\.0\.mixer\.key\.weight is of shape \[16, 16\], got \[16, 17\]",
        of_dtype: r"one whose head\.weight has floating point numbers, got torch\.int8",
        missing: r"one with layers\.0\.mixer\.output\.weight, got none",
        more: r"one with the weights of its configuration alone, got adapter\.weight",
    }.items():
        model = CausalLM(rwkv6_config(**SMALL, head_size=8))
        change(model)
        with pytest.raises(InvalidArgument, match=f"^save: model must be {message}"):
            save(model, tmp_path / "model", format)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_an_error_leaves_nothing_behind(error: BaseException, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalLM(rwkv6_config(**SMALL, head_size=8))
    save(model, tmp_path / "model", format)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def fail(content: object, path: Path, *rest: object) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr("torch.save", fail)
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    for path, overwrite in (("model", True), ("other", False), ("deeper/other", False)):
        with pytest.raises(
            type(error), match="save: path must be .*/(model|other)' .*No space left" if isinstance(error, OSError) else None
        ):
            save(model, tmp_path / path, format, overwrite=overwrite)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_while_files_get_their_names(overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of a folder are new ones, or none is."""
    one, other = (CausalLM(rwkv6_config(**SMALL, head_size=8)) for _ in range(2))
    if overwrite:
        save(one, tmp_path / "model", shard_bytes=4000)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    rename, count, failing = os.replace, 0, 10_000

    def replace(source: Path, target: Path) -> None:
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("os.replace", replace)
    save(other, tmp_path / "copy", shard_bytes=8000)
    moves = count + (len(before) if overwrite else 0)
    shutil.rmtree(tmp_path / "copy")
    for number in range(1, moves + 1):
        count, failing = 0, number
        with pytest.raises(OSError, match=r"save: path must be a place that can be written, got .*Input/output error"):
            save(other, tmp_path / "model", shard_bytes=8000, overwrite=overwrite)
        assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert list(tmp_path.iterdir()) == ([tmp_path / "model"] if overwrite else [])


def test_which_files_of_a_folder_are_a_model(tmp_path: Path) -> None:
    """Others stay, even if they are overwritten; folders are no files."""
    model = CausalLM(gla_config(**SMALL, num_heads=2))
    for name in ("model_old.safetensors", "model.safetensors.bak", "modeling.safetensors"):
        (tmp_path / name).write_text("mine")
    save(model, tmp_path)
    save(model, tmp_path, overwrite=True)
    assert [(tmp_path / name).read_text() for name in ("model_old.safetensors", "model.safetensors.bak")] == ["mine"] * 2
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.safetensors.index.json"):
        folder = tmp_path / name.replace(".", " ")
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(RangeError, match=f"save: path must be a folder without a model, got .* with {name}"):
            save(model, folder)
        save(model, folder, overwrite=True)
        assert sorted(one.name for one in folder.iterdir()) == ["config.json", "model.safetensors"]
    for name in ("config.json", "model.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / "folders" / name / "mine").mkdir(parents=True)
        with pytest.raises(RangeError, match="save: path must be a folder with files of these names only, got"):
            save(model, tmp_path / "folders", overwrite=True)
        assert (tmp_path / "folders" / name / "mine").is_dir()


def test_formats_without_a_place_for_the_model(tmp_path: Path) -> None:
    message = r"format must be one of penstock, fla for this model, got 'blinkdl' \(BlinkDL's RWKV files: it holds RWKV models only\)"
    with pytest.raises(RangeError, match=message):
        save(CausalLM(gla_config(**SMALL, num_heads=2)), tmp_path / "x", "blinkdl")
    with pytest.raises(RangeError, match="format must be one of penstock for this model, got 'fla'"):
        save(CausalLM(linear(**SMALL, num_heads=2)), tmp_path / "x", "fla")
    with pytest.raises(RangeError, match="format must be one of penstock, fla for this model, got 'gguf'"):
        save(CausalLM(gla_config(**SMALL, num_heads=2)), tmp_path / "x", "gguf")
    with pytest.raises(DtypeError, match="model must be a CausalLM"):
        save(torch.nn.Linear(2, 2), tmp_path / "x")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_of_save(tmp_path: Path) -> None:
    model = CausalLM(rwkv6_config(**SMALL, head_size=8))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="save: path must be a str or a Path, got None") as caught:
        save(model, None, shard_bytes="5", overwrite="no")  # type: ignore[arg-type]
    assert "shard_bytes must be a whole number" in str(caught.value)
    assert "overwrite must be a bool" in str(caught.value)
    with pytest.raises(InvalidArgument, match="save: model must be on a device with memory"):
        save(CausalLM(rwkv6_config(**SMALL, head_size=8)).to("meta"), tmp_path / "new")
    for name in ("model.st", *(f"model{end}" for end in NOT_WRITTEN), "MODEL.GGUF"):
        with pytest.raises(RangeError, match=r"path must be the name of a file of torch or of safetensors, such as model\.pth"):
            save(model, tmp_path / name, "blinkdl")
    for name in (*(f"model{end}" for end in (*SUFFIXES, *NOT_WRITTEN)), "MODEL.GGUF"):
        with pytest.raises(RangeError, match=r"path must be a folder, got .*, a name of a file. Take .*/(model|MODEL)'"):
            save(model, tmp_path / name)
    for path, form in ((tmp_path / "file" / "new", "penstock"), (tmp_path / "file" / "new.pth", "blinkdl")):
        with pytest.raises(OSError, match="save: path must be a place that can be written"):
            save(model, path, form)
    with pytest.raises(RangeError, match="path must be a file that does not exist, got '/dev/null'"):
        save(model, "/dev/null", "blinkdl", overwrite=True)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("name", "form"), [("new", "penstock"), ("new.pth", "blinkdl")])
def test_a_full_disk(name: str, form: str, tmp_path: Path) -> None:
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(OSError, match=r"save: path must be a place that can be written, got .*\)\. The disk may be full\.$"):
            save(CausalLM(rwkv6_config(**SMALL, head_size=8)), tmp_path / name, form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "form"), [("new", "penstock"), ("new.pth", "blinkdl")])
@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("/proc/missing", "Its parent folder cannot be made: name another place."),
        ("{}/file", "Its parent folder cannot be made: name another place."),
        ("{}/link", "Its parent folder cannot be made: name another place."),
        ("{}/" + "n" * 300, "Name another place."),
    ],
)
def test_a_place_that_cannot_be_written_says_what_to_do(name: str, form: str, place: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/proc/missing")
    with pytest.raises(OSError, match=rf"save: path must be a place that can be written, got .*\)\. {remedy}$"):
        save(CausalLM(rwkv6_config(**SMALL, head_size=8)), Path(place.format(tmp_path)) / name, form)


@pytest.mark.parametrize(("name", "form"), [("new", "penstock"), ("new.pth", "blinkdl")])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_place_without_rights_says_so(name: str, form: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(OSError, match=r"\)\. This user may not write there: name another place, or change its mode\.$"):
        save(CausalLM(rwkv6_config(**SMALL, head_size=8)), tmp_path / name, form)
