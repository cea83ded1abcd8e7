"""Every command that computes on a CPU takes ``--threads``, and says that other processes use the cores."""

import sys
from dataclasses import replace

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from penstock.cli import COMMANDS, main
from penstock.cli.options import MAX_THREADS
from penstock.models import CausalLM, gla, save
from penstock.verify.machine import Machine, using_threads

ELSEWHERE = {"doctor": "computes nothing", "tune": "on a GPU", "convert": "copies", "bench-serve": "in the server"}
"""Commands that compute nothing on a CPU."""
WORK = {
    "check": (["check"], "penstock.cli.check.print_check"),
    "bench": (["bench", "gla", "--shape", "1,5,2,4"], "penstock.cli.bench.measure"),
    "profile": (["profile", "gla", "--device", "cpu", "--length", "4", "--dtype", "float32"], "penstock.cli.profile.profiled"),
    "train": (["train", "a.yaml"], "penstock.cli.train.run"),
    "generate": (["generate", "--model", "model", "--prompt", "a", "--device", "cpu"], "penstock.cli.generate.load"),
    "serve": (["serve", "--model", "model", "--device", "cpu", "--port", "0"], "penstock.cli.serve.load"),
    "eval": (["eval", "--task", "perplexity", "--model", "model", "--text", "a.yaml", "--device", "cpu"], "penstock.cli.eval.load"),
    "demo": (["demo"], "penstock.cli.demo.print_check"),
}
"""Words of a command, and a function that it calls to compute."""


class Reached(Exception):
    pass


@pytest.fixture
def reached(tmp_path, monkeypatch):
    """Run a command to the begin of its work: the number of threads there, and what it printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(
        "model: {architecture: gla, hidden_size: 16, num_layers: 1}\ndata: {train: a.yaml}\ntraining: {output: run, device: cpu}\n"
    )
    torch.manual_seed(0)
    save(CausalLM(gla(vocab_size=256, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)), tmp_path / "model")
    machine = Machine.here()

    def run(command, *more, load=0.0):
        words, function = WORK[command]
        seen = []

        def work(*_, **__):
            seen.append(torch.get_num_threads())
            raise Reached

        with pytest.MonkeyPatch.context() as patch:
            module, _, name = function.rpartition(".")
            patch.setattr(sys.modules[module], name, work)
            patch.setattr(Machine, "here", lambda: replace(machine, load=load, cores=4, threads=torch.get_num_threads()))
            done = CliRunner().invoke(main, [*words, *more])
        assert isinstance(done.exception, (Reached, SystemExit)), (done.exception, done.output)
        assert seen, done.output
        return seen[0], done.output

    return run


def test_every_command_that_computes_is_tested():
    assert {*WORK, *ELSEWHERE} == {*COMMANDS}
    with_option = {name for name, one in get_command(main).commands.items() if any("--threads" in x.opts for x in one.params)}
    assert with_option == {*WORK}


@pytest.mark.parametrize("command", WORK)
def test_a_command_computes_with_the_threads_that_are_asked_for(reached, command):
    if command in ("train", "serve"):
        pytest.importorskip("transformers" if command == "train" else "fastapi")
    before = torch.get_num_threads()
    assert reached(command, "--threads", "3")[0] == 3
    assert reached(command)[0] == before == torch.get_num_threads()
    assert CliRunner().invoke(main, [*WORK[command][0], "--threads", str(MAX_THREADS + 1)]).exit_code == 2


@pytest.mark.parametrize("command", [name for name in WORK if name != "check"])
def test_a_command_says_that_the_cores_are_busy(reached, command):
    if command in ("train", "serve"):
        pytest.importorskip("transformers" if command == "train" else "fastapi")
    said = "Other processes use 1.6 of 4 cores: times will be too long and will vary."
    assert said not in reached(command)[1]
    assert said in reached(command, load=1.6)[1]
    assert f"{said} Fewer threads (--threads 2) may be faster." in reached(command, "--threads", "3", load=1.6)[1]
    assert "Fewer threads" not in reached(command, "--threads", "2", load=1.6)[1]


@pytest.mark.parametrize("allowed", [1, 2])
def test_commands_start_with_the_threads_of_the_quota(reached, monkeypatch, allowed):
    monkeypatch.setattr("penstock.cli.default_threads", lambda: allowed)
    with using_threads(4):
        assert reached("generate")[0] == allowed
        assert torch.get_num_threads() == 4
