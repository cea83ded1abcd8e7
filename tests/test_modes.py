"""What is written has the mode of the umask, so that others whom it lets read can read."""

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import main
from penstock.engine import Engine, SamplingParams
from penstock.models import CausalLM, rwkv6, save

SIZES = {"vocab_size": 256, "hidden_size": 16, "num_layers": 2, "head_size": 8, "intermediate_size": 16}
CONFIG = """
model: {architecture: rwkv6, hidden_size: 16, num_layers: 1, head_size: 8, intermediate_size: 16}
data: {train: a.yaml, length: 16}
training: {output: out/run, steps: 2, save_every: 1, batch_size: 2, device: cpu}
"""


def run(*words):
    done = CliRunner().invoke(main, list(words))
    assert done.exit_code == 0, (done.output, done.exception)


def converted(form):
    return lambda model: (save(model, "in"), run("convert", "in", f"out/{form}", "--to", form))


def trained(model):
    pytest.importorskip("transformers")
    Path("a.yaml").write_text(CONFIG)
    run("train", "a.yaml")


def kept_state(model):
    engine = Engine(model.eval(), slots=2, token_budget=256)
    state = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, keep_state=True))[0].completions[0].state
    Path("out").mkdir()
    engine.save_state(state, "out/state")


def cuda_code(model):
    from penstock.gpu.nvrtc import _write

    _write(Path("out/cache/code"), b"code")


def tuned(model):
    from penstock.recurrence.triton.table_file import write

    write(Path("out/table.json"), "sm_90", [])


WRITERS = {
    "save": lambda model: save(model, "out/model"),
    "save in parts": lambda model: save(model, "out/model", shard_bytes=4000),
    "save over an earlier one": lambda model: [save(model, "out/model", overwrite=True) for _ in range(2)],
    "convert to penstock": converted("penstock"),
    "convert to blinkdl": converted("blinkdl"),
    "convert to hf": converted("hf"),
    "train": trained,
    "a state of the engine": kept_state,
    "bench": lambda model: run(
        "bench", "gla", "--shape", "1,5,2,4", "--seconds", "0.002", "--json", "out/deep/a.json", "--plot", "out/a.png"
    ),
    "profile": lambda model: run(
        *("profile", "gla", "--length", "4", "--heads", "1", "--head-dim", "4", "--dtype", "float32", "--device", "cpu"),
        *("--impl", "chunkwise", "--peer", "none", "--seconds", "0.002", "--json", "out/a.json", "--output", "out/traces"),
    ),
    "eval": lambda model: (save(model, "in"), Path("a").write_text("text"), run(
        "eval", "--task", "perplexity", "--model", "in", "--text", "a", "--device", "cpu", "--json", "out/a.json"
    )),
    "machine code": cuda_code,
    "a table of block sizes": tuned,
}  # fmt: skip
"""Everything that writes, below the folder ``out``."""


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("writer", WRITERS)
def test_written_files_have_the_mode_of_the_umask(writer, mask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = CausalLM(rwkv6(**SIZES))
    before = os.umask(mask)
    try:
        WRITERS[writer](model)
    finally:
        os.umask(before)
    places = [Path("out"), *Path("out").rglob("*")]
    assert any(place.is_file() for place in places)
    for place in places:
        assert place.stat().st_mode & 0o777 == (0o777 if place.is_dir() else 0o666) & ~mask, place
