"""Paths that are no checkpoint: every function and command that takes one says what it is, and where checkpoints are found."""

import sys
from pathlib import Path

import pytest
import torch
from sampling import every
from typer.testing import CliRunner

from penstock.cli import main
from penstock.errors import PenstockError
from penstock.models import CausalLM, load, rwkv6, save
from penstock.models.checkpoints.places import hub_name
from penstock.models.tokenizers import load_tokenizer

HUB = "RWKV/rwkv-6-world-1b6"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 3226110392\n"
COMMANDS = {
    "generate": ["generate", "--prompt", "a", "--model"],
    "serve": ["serve", "--port", "0", "--model"],
    "eval": ["eval", "--task", "perplexity", "--text", "a.txt", "--model"],
    "convert": ["convert"],
    "train": ["train"],
}
"""Words of every command that takes a checkpoint; the path is last."""
ARGUMENTS = {"convert": "SRC", "train": "model.path"}


def command(name):
    def run(path, *more):
        if name in ("serve", "train"):
            pytest.importorskip("fastapi" if name == "serve" else "transformers")
        words = [*COMMANDS[name], path]
        if name == "convert":
            words += ["converted", "--overwrite"]
        if name == "train":
            settings = "data: {train: a.txt, length: 2}\ntraining: {output: run, steps: 1, batch_size: 1, device: cpu}\n"
            Path("a.yaml").write_text(f"model: {{path: '{path}'}}\n{settings}")
            words = ["train", "a.yaml"]
        done = CliRunner().invoke(main, [*words, *(["--device", "cpu"] if name in ("generate", "serve", "eval") else []), *more])
        if isinstance(done.exception, SystemExit) and done.exit_code == 2:
            raise PenstockError(done.stderr)
        return done

    return run


TAKERS = {"load": load, "load_tokenizer": load_tokenizer, **{name: command(name) for name in COMMANDS}}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a text")


def said(taker, path):
    with pytest.raises(PenstockError) as error:
        TAKERS[taker](path)
    return str(error.value)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_name_on_the_hub_is_recognised(taker):
    message = said(taker, HUB)
    name = f"{taker}: {ARGUMENTS.get(taker, 'model' if taker in COMMANDS else 'path')} must be an existing file or folder, got {HUB!r}"
    assert message.startswith(f"{name}, which does not exist and has the form of a name on the Hugging Face hub. Download it with ")
    assert f"hf download {HUB} --local-dir rwkv-6-world-1b6 (pip install huggingface_hub), and pass rwkv-6-world-1b6." in message
    assert ("Or add --download." in message) is (taker in COMMANDS)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_missing_path_says_where_checkpoints_are(taker):
    kinds = "a tokenizer.json, or a checkpoint" if taker == "load_tokenizer" else "a .pth, .bin or .safetensors file"
    assert f"'/no/where', which does not exist. Pass {kinds}" in said(taker, "/no/where")
    Path("model.pth").write_bytes(b"")
    assert "'modell.pth', which does not exist. Did you mean 'model.pth'?" in said(taker, "modell.pth")


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("name", ["model.pth", "folder/model.safetensors"])
def test_a_pointer_of_git_lfs_is_recognised(taker, name):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(POINTER)
    message = said(taker, name.partition("/")[0])
    assert f"got '{name}', which is a Git LFS pointer to a file of 3,226,110,392 bytes. Run git lfs pull in its folder" in message


def test_other_files_in_place_of_a_large_one_are_recognised(tmp_path):
    pytest.importorskip("tokenizers")
    Path("model.pth").write_bytes(b"\n<!DOCTYPE html><html></html>")
    assert "'model.pth', which is a web page. Download the file itself, not the page that shows it." in said("load", "model.pth")
    Path("tokenizer.json").write_bytes(POINTER)
    assert "file must be the file itself, got 'tokenizer.json', which is a Git LFS pointer" in said("load_tokenizer", "tokenizer.json")
    Path("a.txt").write_bytes(POINTER)
    torch.manual_seed(0)
    save(CausalLM(rwkv6(vocab_size=256, hidden_size=16, num_layers=1, head_size=8)), tmp_path / "model")
    assert "text must be a text file in UTF-8, got 'a.txt' (it is a Git LFS pointer" in said("eval", "model")


@pytest.mark.parametrize("taker", TAKERS)
def test_a_folder_of_a_training_names_its_checkpoints(taker):
    torch.manual_seed(0)
    for steps in (20, 100, 3):
        save(CausalLM(rwkv6(vocab_size=256, hidden_size=16, num_layers=1, head_size=8)), f"run/checkpoint-{steps}")
    Path("run/runs").mkdir()
    names = "checkpoint-3, checkpoint-20, checkpoint-100"
    assert f"It has folders with models: {names}. Pass one of these, as 'run/checkpoint-100'." in said(taker, "run")


@pytest.mark.parametrize(
    ("path", "repository", "file"),
    [
        (HUB, HUB, None),
        (f"https://huggingface.co/{HUB}", HUB, None),
        ("BlinkDL/rwkv-6-world/RWKV-x060-World-1B6-v2.1.pth", "BlinkDL/rwkv-6-world", "RWKV-x060-World-1B6-v2.1.pth"),
    ],
)
def test_names_on_the_hub(path, repository, file):
    assert hub_name(Path(path)) == (repository, file)


@pytest.mark.parametrize("path", ["model.pth", "/models/a", "./a/b", "../a/b", "folder/model", "a"])
def test_other_paths_are_no_names_on_the_hub(path):
    Path("folder").mkdir()
    assert hub_name(Path(path) if not path.startswith("./") else Path("folder") / path) is None


class Hub:
    """Stands for huggingface_hub's functions."""

    def __init__(self, files, folder):
        self.files, self.folder, self.asked = files, folder, []

    def list_repo_files(self, repository):
        self.asked.append(repository)
        if isinstance(self.files, Exception):
            raise self.files
        return self.files

    def snapshot_download(self, repository, allow_patterns):
        self.asked.append(allow_patterns)
        return str(self.folder)

    def hf_hub_download(self, repository, file):
        self.asked.append((repository, file))
        return str(self.folder / file)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    package = pytest.importorskip("huggingface_hub")

    def make(files):
        torch.manual_seed(0)
        model = CausalLM(rwkv6(vocab_size=256, hidden_size=16, num_layers=1, head_size=8))
        if not (tmp_path / "cache").exists():
            save(model, tmp_path / "cache")
            save(model, tmp_path / "cache" / "one.pth", "blinkdl")
        found = Hub(files, tmp_path / "cache")
        monkeypatch.setattr(package, "HfApi", lambda: found)
        monkeypatch.setattr(package, "snapshot_download", found.snapshot_download)
        monkeypatch.setattr(package, "hf_hub_download", found.hf_hub_download)
        return found

    return make


WHOLE = ["model.safetensors", "pytorch_model.bin", "config.json", "tokenizer.json", "README.md", "onnx/model.bin"]


@pytest.mark.parametrize("name", every(2, [name for name in COMMANDS if name != "serve"]))
def test_download_gets_one_checkpoint(hub, name):
    found = hub(WHOLE)
    done = command(name)(HUB, "--download")
    assert f"{HUB}: downloading from the Hugging Face hub" in done.stderr
    assert found.asked == [HUB, ["model.safetensors", "config.json", "tokenizer.json"]]
    assert f"{HUB}: {found.folder}" in done.stderr
    found.asked.clear()
    command(name)("owner/name/one.pth", "--download")
    assert found.asked == [("owner/name", "one.pth")]


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_downloaded_silently(hub, name):
    found = hub(WHOLE)
    with pytest.raises(PenstockError, match="Or add --download"):
        command(name)(HUB)
    assert found.asked == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["README.md"], "model must be a repository with .safetensors, .bin, .pth files"),
        (["a.pth", "b.pth"], f"'{HUB}' with 2: a.pth, b.pth. Pass {HUB}/FILE."),
        (RuntimeError("no network\nmore"), f"model must be a name that the hub has, got '{HUB}' \\(no network\\)"),
    ],
)
def test_a_download_that_fails_says_why(hub, files, message):
    hub(files)
    with pytest.raises(PenstockError, match=message):
        command("generate")(HUB, "--download")


def test_a_download_needs_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PenstockError, match=r"generate: huggingface_hub must be installed, got none. Run pip install huggingface_hub"):
        command("generate")(HUB, "--download")
