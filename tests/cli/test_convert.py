"""``penstock convert``: what it writes and prints, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from formulas import error
from public_models import Draw, gla, rwkv6, tokens, write_pth, write_safetensors
from typer.testing import CliRunner, Result

from penstock.cli import main
from penstock.models import load

IDS = tokens(8, 13)


def convert(*words: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, words)])


@torch.no_grad()
def test_a_model_through_all_formats(tmp_path: Path) -> None:
    w = rwkv6.draw()
    true = rwkv6.logits(w, IDS)
    path = write_pth(w, tmp_path)
    for to in ("hf", "penstock", "fla", "blinkdl"):
        source, path = path, tmp_path / to
        done = convert(source, path, "--to", to)
        assert done.exit_code == 0, done.output
        assert error(load(path)(IDS[None]).logits[0], true) < 1e-5
    again = torch.load(path, weights_only=True)
    assert all(torch.equal(x, again[name]) for name, x in w.items())
    assert done.output.splitlines() == [
        f"{path}: rwkv6, num_layers 2, hidden_size 24, vocab_size 13",
        f"{sum(x.numel() for x in w.values()):,} weights, float32",
    ]


def test_dtype_and_tokenizers(tmp_path: Path) -> None:
    source = write_safetensors(gla.draw(gla.config()), gla.config(), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    done = convert(source, tmp_path / "half", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "copied tokenizer.json, chat_template.jinja, additional_chat_templates/tool_use.jinja"
    assert (tmp_path / "half/chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "half/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
    assert {x.dtype for x in load(tmp_path / "half").parameters()} == {torch.bfloat16}


def test_tokenizers_of_an_earlier_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay unless the model is overwritten. If they cannot be copied, all files stay as they were."""
    source = write_safetensors(gla.draw(gla.config()), gla.config(), tmp_path / "source")
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    for name in names:
        (source / name).write_text("new")
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("old")
    (target / "mine.json").write_text("mine")
    assert convert(source, target).output.splitlines()[-1] == "copied tokenizer_config.json, vocab.json"
    assert (target / "tokenizer.json").read_text() == "old"
    (target / "tokenizer_config.json").unlink()

    def fail(source: Path, target: Path) -> None:
        Path(target).write_text("half")
        if target.name == "vocab.json":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", fail)
        done = convert(source, target, "--overwrite")
    assert (done.exit_code, done.output.splitlines()[-1][:45]) == (2, "save: path must be a place that can be writte")
    assert "No space left" in done.output
    kept = {one.name: one.read_text() for one in target.iterdir() if one.name not in ("config.json", "model.safetensors")}
    assert kept == {"tokenizer.json": "old", "vocab.json": "new", "mine.json": "mine"}
    assert convert(source, target, "--overwrite").output.splitlines()[-1] == f"copied {', '.join(names)}"
    assert [(target / name).read_text() for name in (*names, "mine.json")] == ["new", "new", "new", "mine"]


@torch.no_grad()
def test_files_beside_the_model(tmp_path: Path) -> None:
    w, random = rwkv6.draw(), Draw(4)
    tuned = {name: x for name, x in rwkv6.with_time_state(w).items() if name not in w}
    A, B, A0, B0 = random(2, 24), random(24, 2), random(2, 24), random(24, 2)
    files = {
        "state": tuned,
        "lora": {"blocks.0.att.key.lora_A": A, "blocks.0.att.key.lora_B": B},
        "init": {"blocks.0.att.key.init_lora_A": A0, "blocks.0.att.key.init_lora_B": B0},
    }
    for name, content in files.items():
        torch.save(content, tmp_path / f"{name}.pth")
    source, key = write_pth(w, tmp_path), "blocks.0.att.key.weight"
    for words, changes in {
        ("--state", tmp_path / "state.pth"): tuned,
        ("--adapter", tmp_path / "lora.pth", "--adapter-alpha", "3"): {key: w[key] + 1.5 * B @ A},
        ("--adapter", tmp_path / "lora.pth", "--adapter-init", tmp_path / "init.pth"): {key: w[key] + B @ A - B0 @ A0},
    }.items():
        target = tmp_path / f"made {len(words)}{words[-2]}"
        assert convert(source, target, *words).exit_code == 0
        assert error(load(target)(IDS[None]).logits[0], rwkv6.logits(w | changes, IDS)) < 1e-5
    done = convert(source, tmp_path / "x", "--adapter", tmp_path / "lora.pth")
    assert (done.exit_code, done.output[:47]) == (2, "load: adapter_alpha must be given for a file of")


def test_errors(tmp_path: Path) -> None:
    source = write_pth(rwkv6.draw(), tmp_path)
    other = write_safetensors(gla.draw(gla.config()), gla.config(), tmp_path / "gla")
    (tmp_path / "file").write_text("")
    (tmp_path / "there.pth").write_text("")
    for words, message in {
        (source, tmp_path / "x", "--to", "gguf"): "convert: to must be one of penstock, blinkdl, hf, fla, got 'gguf'",
        (source, tmp_path / "x", "--dtype", "int8"): "convert: dtype must be one of",
        (source, source, "--to", "blinkdl"): "convert: DST must be apart from SRC",
        (source, tmp_path / "x.pth"): f"convert: DST must be a folder, got '{tmp_path}/x.pth', a name of a file. Take '{tmp_path}/x'."
        " Of the formats, only blinkdl is one file.",
        (source, tmp_path / "x.gguf"): f"convert: DST must be a folder, got '{tmp_path}/x.gguf', a name of a file. Take '{tmp_path}/x'.",
        (source, tmp_path / "file"): "convert: DST must be a folder that can be written",
        (source, tmp_path, "--to", "blinkdl"): "convert: DST must be a file that can be written",
        (other, tmp_path / "x", "--to", "blinkdl"): "save: format must be one of penstock, fla for this model, got 'blinkdl'",
        (source, other): f"convert: DST must be a folder without a model, got '{other}' with config.json, model.safetensors."
        " Name another one, or replace it with --overwrite.",
        (
            source,
            tmp_path / "there.pth",
            "--to",
            "blinkdl",
        ): f"convert: DST must be a file that does not exist, got '{tmp_path}/there.pth'."
        " Name another one, or replace it with --overwrite.",
        (tmp_path / "none", tmp_path / "x"): "convert: SRC must be an existing file or folder",
    }.items():
        done = convert(*words)
        assert done.exit_code == 2, words
        assert done.output.startswith(message), done.output
    assert not [*tmp_path.glob("x*")]
    assert convert(source, other, "--overwrite").exit_code == 0
    assert load(other).config.mixers[0].kind == "rwkv6"


@pytest.mark.parametrize("words", [[], ["x"]])
def test_both_paths_are_required(words: list[str]) -> None:
    assert convert(*words).exit_code == 2
