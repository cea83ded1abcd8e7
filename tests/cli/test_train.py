"""``penstock train``: what it prints, and its errors."""

import subprocess
import sys

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


@pytest.mark.slow
def test_several_processes_print_once(tmp_path):
    """Two steps on two sharded ranks, then two more on one."""
    (tmp_path / "a.txt").write_text("words and more words " * 20)
    (tmp_path / "a.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)) + "mesh: {shard: true}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, "-m", "penstock", "train", str(tmp_path / "a.yaml")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n2 steps\n") == done.stdout.count("penstock generate --model") == 1
    assert "float32 on cpu, 1 thread, 2 ranks, sharded" in done.stderr
    assert done.stderr.count("2 steps, each of 32 tokens (2 samples)") == 1
    for path in ("run/checkpoint-2", "run"):
        converted = run("convert", str(tmp_path / path), str(tmp_path / f"{path} as fla"), "--to", "fla")
        assert converted.exit_code == 0, converted.output
    (tmp_path / "a.yaml").write_text((tmp_path / "a.yaml").read_text().replace("steps: 2", "steps: 4"))
    done = run("train", str(tmp_path / "a.yaml"))
    assert done.exit_code == 0, done.output
    assert "steps 3 to 4" in done.stderr
    (tmp_path / "a.yaml").write_text((tmp_path / "a.yaml").read_text().replace("shard: true", "dp: 3"))
    done = subprocess.run([*torchrun, "-m", "penstock", "train", str(tmp_path / "a.yaml")], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "train: mesh must be of 2 processes, got dp 3 * cp 1 = 3. Start torchrun --nproc-per-node 3" in done.stderr


def test_an_interruption_says_how_to_continue(tmp_path, monkeypatch):
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
