"""The recipe for a LoRA in docs/howto.md, with a small model."""

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
