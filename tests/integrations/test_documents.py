"""The recipes for a LoRA in docs/howto.md, with small models."""

import shutil
import sys

import pytest
from documents import ROOT, blocks

for package in ("trl", "peft", "datasets"):
    pytest.importorskip(package)

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_recipe_for_a_lora_runs_as_written(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders["rwkv6"], tmp_path / "base")
    (text,) = (block.text for block in blocks("python", page=ROOT / "docs/howto.md") if "SFTTrainer" in block.text)
    text = text.replace("max_steps=20", "max_steps=2, use_cpu=True, report_to=[], save_strategy='no', disable_tqdm=True")
    exec(text, {"__name__": "recipe"})
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    from penstock.models import load

    assert load(tmp_path / "base", adapter=tmp_path / "adapter").config.num_layers == 2
    assert "trl" in sys.modules


def test_the_recipe_for_a_converted_file_runs_as_written(tmp_path, monkeypatch):
    """From a file in BlinkDL's names, which has no tokenizer of transformers, to an adapter that changes the model."""
    import torch
    from typer.testing import CliRunner

    from penstock.cli import main
    from penstock.models import CausalLM, load, rwkv7, save

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save(CausalLM(rwkv7(vocab_size=256, num_layers=2, hidden_size=32, head_size=16)), tmp_path / "small.pth", "blinkdl")
    assert CliRunner().invoke(main, ["convert", "small.pth", "base"]).exit_code == 0
    (text,) = (block.text for block in blocks("python", page=ROOT / "docs/howto.md") if "load_tokenizer" in block.text)
    text = text.replace("max_steps=20", "max_steps=2, use_cpu=True, report_to=[], save_strategy='no', disable_tqdm=True")
    exec(text, {"__name__": "recipe"})
    ids = torch.tensor([list(b"The answer")])
    assert not torch.equal(load(tmp_path / "base", adapter=tmp_path / "adapter")(ids).logits, load(tmp_path / "base")(ids).logits)
