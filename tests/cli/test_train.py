"""``penstock train``: what it prints, and its errors."""

import pytest
from typer.testing import CliRunner

from penstock.cli import main

pytest.importorskip("transformers")

CONFIG = """
model: {architecture: gla, hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 16}
data: {train: FOLDER/a.txt, length: 16}
training: {output: FOLDER/run, steps: 2, batch_size: 2, tensorboard: false, device: cpu}
"""


def run(*words):
    return CliRunner().invoke(main, list(words))


def test_a_trained_model_generates(tmp_path):
    (tmp_path / "a.txt").write_text("words and more words " * 20)
    (tmp_path / "a.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    done = run("train", str(tmp_path / "a.yaml"))
    assert done.exit_code == 0, done.output
    assert "2 steps" in done.output
    for word in ("model: gla, ", "training: 420 tokens, 26 samples of 16", "2 steps, each of 32 tokens (2 samples)"):
        assert word in done.stderr
    assert f"penstock generate --model {tmp_path / 'run'} --prompt TEXT" in done.output
    done = run("generate", "--model", str(tmp_path / "run"), "--prompt", "words", "--max-tokens", "5", "--device", "cpu")
    assert done.exit_code == 0, done.output


def test_an_interruption_says_how_to_continue(tmp_path, monkeypatch):
    import sys

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["penstock.cli.train"], "run", interrupted)
    (tmp_path / "a.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    done = run("train", str(tmp_path / "a.yaml"))
    assert done.exit_code == 130
    assert "Interrupted. There is no checkpoint yet (training.save_every is 500 steps): the same command begins again." in done.stderr


def test_unknown_keys_are_named(tmp_path):
    (tmp_path / "a.yaml").write_text(CONFIG.replace("steps", "step"))
    done = run("train", str(tmp_path / "a.yaml"))
    assert done.exit_code == 2
    assert "train: training must be made of accumulate, " in done.output
    assert "got 'step'. Did you mean steps?" in done.output


def test_missing_files_are_named(tmp_path):
    (tmp_path / "a.yaml").write_text(CONFIG)
    done = run("train", str(tmp_path / "a.yaml"))
    assert done.exit_code == 2
    assert "train: data.train must be files that exist, or patterns of them, got 'FOLDER/a.txt'" in done.output


def test_a_file_as_output_is_refused_at_once(tmp_path):
    (tmp_path / "run").write_text("")
    (tmp_path / "a.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    done = run("train", str(tmp_path / "a.yaml"))
    assert done.exit_code == 2
    assert "train: training.output must be a folder that can be written, got " in done.output
