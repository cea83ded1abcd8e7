"""Consoles of every encoding get every text: what the encoding lacks is written as an escape."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import penstock
from penstock.cli import COMMANDS, main
from penstock.models import CausalLM, gla, save

ENCODINGS = ["utf-8", "ascii", "latin-1", "cp1252", "cp437", "gbk", "shift_jis", "big5", "koi8-r"]
TEXT = "é 世界 € Ж \U0001f600"
"""No encoding above but the first has all of it."""


def read(content, encoding):
    """What a console shows, with its escapes undone."""
    shown = content.decode("utf-8" if encoding == "ascii" and not content.isascii() else encoding)
    return re.sub(r"\\(x..|u.{4}|U.{8})", lambda match: chr(int(match[1][1:], 16)), shown)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_and_messages_of_every_command(command, encoding, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner(charset=encoding)
    done = runner.invoke(main, [*command.split(), "--help"])
    assert done.exit_code == 0, done.exception
    assert "Usage:" in read(done.stdout_bytes, encoding)
    wrong = runner.invoke(main, [*command.split(), f"--{TEXT}"])
    assert (wrong.exit_code, type(wrong.exception)) == (2, SystemExit), wrong.exception
    assert f"--{TEXT}" in read(wrong.stderr_bytes, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_generated_text(encoding, tmp_path, monkeypatch):
    torch.manual_seed(0)
    save(CausalLM(gla(vocab_size=256, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)), tmp_path / "model")
    monkeypatch.setattr(sys.modules["penstock.cli.generate"], "stream", lambda *_, **__: iter(TEXT.encode()))
    done = CliRunner(charset=encoding).invoke(main, ["generate", "--model", str(tmp_path / "model"), "--prompt", "a", "--device", "cpu"])
    assert done.exit_code == 0, done.exception
    assert read(done.stdout_bytes, encoding) == TEXT + "\n"


def test_a_console_of_another_encoding(tmp_path):
    """The whole program."""
    root = Path(penstock.__file__).parents[1]
    missing = tmp_path / "世界.pth"
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(root)}
    words = [sys.executable, "-m", "penstock", "generate", "--model", str(missing), "--prompt", "a"]
    done = subprocess.run(words, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert str(missing) in read(done.stderr, "cp1252")
