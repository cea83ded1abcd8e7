"""Models need torch only."""

import subprocess
import sys

FRESH = """
import sys
import torch
before = set(sys.modules)
import penstock.models
print(*sorted(name.partition(".")[0] for name in set(sys.modules) - before))
"""
OPTIONAL = {"triton", "transformers", "tokenizers", "safetensors", "accelerate", "pyrwkv_tokenizer", "yaml", "numpy"}


def test_optional_packages_are_not_imported() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True)
    assert "penstock" in done.stdout
    assert not set(done.stdout.split()) & OPTIONAL
