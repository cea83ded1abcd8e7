"""The commands: what they print and write, and their errors."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import penstock
from penstock.bench.cases import Case, default_cases
from penstock.call.families import variants
from penstock.cli import main
from penstock.recurrence.operators import FAMILY
from penstock.tokens.shape import Shape

TINY = ["--shape", "1,5,2,4", "--seconds", "0.002", "--threads", "1"]

BENCH = sys.modules["penstock.cli.bench"]
"""The module. Its package has the command under the same name."""


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *words: CliRunner().invoke(main, list(words))


@pytest.mark.parametrize(
    "command", ["", "check", "doctor", "bench", "profile", "tune", "train", "generate", "serve", "bench-serve", "eval", "convert", "demo"]
)
def test_help_shows_all_text_and_every_default(run, monkeypatch, command):
    """Rich would drop text in square brackets as markup."""
    group = get_command(main)
    documented = group.commands[command] if command else group
    monkeypatch.setenv("COLUMNS", "1000")  # a line for each option
    lines = [" ".join(line.split()) for line in run(*command.split(), "--help").output.splitlines()]
    for paragraph in documented.help.split("\n\n"):
        assert re.sub(r"\[/?bold\]", "", paragraph).strip() in lines
    defaults = 0
    for parameter in documented.params:
        (line,) = (line for line in lines if f"{parameter.help} " in line)
        shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        if parameter.show_default and shown is not None and shown is not False:
            defaults += 1
            assert f"[default: ({shown})]" in line or f"[default: {shown}]" in line
    for width in (80, 100, 140):
        monkeypatch.setenv("COLUMNS", str(width))
        done = run(*command.split(), "--help")
        assert done.exit_code == 0
        assert done.output.count("[default: ") == defaults
        assert all(len(line) <= width for line in done.output.splitlines())
        assert "…" not in done.output
        words = done.output.replace("│", " ").split()
        for parameter in documented.params:
            name = ",".join(parameter.opts) if parameter.param_type_name == "option" else parameter.metavar
            rest = iter(words[words.index(name) :])
            assert all(word in rest for word in parameter.help.split())  # in this order; words of other columns are between them


def test_bench_serve_is_bench_serve_in_one_word(run):
    assert run("bench", "serve", "--help").output == run("bench-serve", "--help").output
    assert "variant must be one of" in run("bench", "server").output


def test_help_of_bench_shows_its_defaults():
    shown = {parameter.name: parameter.show_default for parameter in get_command(main).commands["bench"].params}
    wanted = ["fwd", "auto", "loop; sdpa for softmax_attention", "float32", "cpu", "1"]
    assert [shown[name] for name in ("mode", "impl", "peers", "dtype", "device", "seconds")] == wanted


@pytest.mark.parametrize("words", [["--version"], ["--version", "bench"]])
def test_version(run, words):
    done = run(*words)
    assert (done.exit_code, done.output) == (0, f"penstock {penstock.__version__}\n")


def test_check_passes_and_prints_json(run, at_full_speed, check_in_float32):
    done = run("check", "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["ok"]
    assert content["machine"]["torch"] == torch.__version__
    assert {one["variant"] for one in content["findings"] if one["error"] is not None} == {*variants(), "layers"}


def test_check_fails_if_an_implementation_is_wrong(run, monkeypatch, at_full_speed, check_in_float32):
    right = FAMILY.named("reference")
    bad = replace(right, name="bad", advance=lambda problem: right.advance(problem) + 1)
    absent = replace(right, name="absent", available=lambda: "this machine has none")
    monkeypatch.setattr(FAMILY, "implementations", (bad, absent, right))
    done = run("check")
    assert done.exit_code == 1
    assert "WRONG: bad, gla, float32 on cpu: output in place" in done.output
    assert "not available: this machine has none" in done.output
    assert "not available on this machine: absent" in done.output
    assert "absent did not run" not in done.output


def test_bench_prints_and_writes(run, tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "deep" / "picture.png"
    shapes = ["--shape", "1,9,2,4", "--mode", "fwdbwd", "--mode", "fwd", "--impl", "auto", "--impl", "chunkwise"]
    done = run("bench", "rwkv6", "gla", *TINY, *shapes, "--json", str(numbers), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    for word in (
        "rwkv6, fwd",
        "gla, fwdbwd",
        "token loop",
        "auto (cpu)" if FAMILY.named("cpu").available() is None else "auto",
        "floor",
    ):
        assert word in done.output
    content = json.loads(numbers.read_text())
    assert len(content["measurements"]) == 8
    assert content["machine"]["penstock"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_bench_draws_one_shape_and_decodes(run, tmp_path):
    done = run(
        "bench",
        "linear_attention",
        "--mode",
        "decode",
        "--peer",
        "none",
        "--shape",
        "3,1,2,4",
        "--seconds",
        "0.002",
        "--plot",
        str(tmp_path / "a.svg"),
    )
    assert done.exit_code == 0, done.output
    assert " 1.00 " in done.output
    assert "token loop  " not in done.output
    assert (tmp_path / "a.svg").exists()


def test_bench_has_a_default_case_for_softmax_attention(run, monkeypatch):
    tiny = Case("tiny", "softmax_attention", Shape(1, 20, 2, 8, 8), "tiny")
    assert [case.name for case in default_cases("softmax_attention", False)] == ["llama-7b"]
    monkeypatch.setattr("penstock.bench.cases.SOFTMAX_MODEL", tiny)
    done = run("bench", "softmax_attention", "--seconds", "0.002", "--threads", "1")
    assert done.exit_code == 0, done.output
    for word in ("softmax_attention, fwd, float32 on cpu", "1,20,2,8", "penstock (auto)", "sdpa"):
        assert word in done.output


@pytest.mark.parametrize("words", [["--impl", "sdpa", "--impl", "reference"], ["--impl", "reference", "--peer", "none"]])
def test_bench_of_softmax_attention_takes_implementations_and_peers(run, tmp_path, words):
    numbers, picture = tmp_path / "a.json", tmp_path / "a.png"
    shapes = ["--shape", "1,20,2,8", "--shape", "1,30,3,8"]
    done = run("bench", "softmax_attention", *shapes, *words, "--seconds", "0.002", "--json", str(numbers), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    impls = [f"penstock ({name})" for name in words[1::2] if name != "none"]
    for one in json.loads(numbers.read_text())["measurements"]:
        assert [timing["candidate"] for timing in one["timings"]] == (["sdpa"] if "none" not in words else []) + impls
        assert one["first"] == one["timings"][0]["candidate"]
    assert picture.exists()


def test_a_refusing_implementation_of_softmax_attention_is_an_error(run):
    done = run("bench", "softmax_attention", "--shape", "1,20,2,8", "--impl", "triton", "--dtype", "float64")
    assert done.exit_code == 2
    assert "softmax_attention: impl must be one that takes this call, got 'triton'" in done.output


def test_bench_of_both_families_has_the_default_peers_of_each(run, tmp_path):
    numbers = tmp_path / "a.json"
    done = run("bench", "gla", "softmax_attention", "--shape", "1,5,2,4", "--seconds", "0.002", "--json", str(numbers))
    assert done.exit_code == 0, done.output
    assert [one["timings"][0]["candidate"] for one in json.loads(numbers.read_text())["measurements"]] == ["token loop", "sdpa"]


def test_bench_without_measurements_fails(run, monkeypatch, tmp_path):
    """There is no job, or no candidate was timed."""
    measure = BENCH.measure
    monkeypatch.setattr(BENCH, "_jobs", lambda *_: [])
    done = run("bench", "gla", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 1
    assert done.output.endswith("Nothing was measured.\n")
    assert not (tmp_path / "a.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(BENCH, "measure", lambda *rest, **options: replace(measure(*rest, **options), timings=()))
    done = run("bench", "gla", *TINY, "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 1
    assert done.output.endswith("Nothing was measured.\n")


def test_a_record_without_measurements_is_refused(run, tmp_path):
    file = tmp_path / "a.json"
    assert run("bench", "gla", *TINY, "--json", str(file)).exit_code == 0
    file.write_text(json.dumps(json.loads(file.read_text()) | {"measurements": []}))
    done = run("bench", "--from", str(file), "--plot", str(tmp_path / "a.png"))
    assert done.exit_code == 2
    assert "(ValueError: it has no measurements)" in done.output


def test_bench_restores_threads(run):
    before = torch.get_num_threads()
    assert run("bench", "gla", *TINY[:-1], "2").exit_code == 0
    assert torch.get_num_threads() == before


def test_bench_lists_its_cases(run):
    done = run("bench", "--list")
    assert done.exit_code == 0
    for name in ("rwkv6-7b-decode-256", "--suite gpu-training", "VARIANT-8x2048x4x256x512", "VARIANT-1x163840x32x64"):
        assert name in done.output


def test_bench_redraws_a_record(run, tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.png"
    measured = run("bench", "gla", *TINY, "--json", str(numbers))
    again = run("bench", "--from", str(numbers), "--plot", str(picture))
    assert again.exit_code == 0, again.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    table = measured.output[measured.output.index("gla, fwd") : measured.output.index("numbers:")]
    assert table in again.output


def test_bench_draws_several_records_of_strengths_as_one(run, monkeypatch, tmp_path):
    """A missing peer is in the table with its reason, in the record and in the picture of each shape; the exit code is 0."""
    from penstock.bench.suites import Suite

    rows = tuple(Case(f"kda-{gates}-{T}", "kda", Shape(1, T, 2, 4, 4), "tiny", gates) for T in (3, 4) for gates in ("slow", "resets"))
    tiny = Suite("tiny", "", rows, ("fwd", "fwdbwd"), ("chunkwise",), ("flash_kda", "flash_qla"), "float32", "cpu", 0.001)
    monkeypatch.setattr("penstock.bench.suites.SUITES", (tiny,))
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    done = run("bench", "--suite", "tiny", "--json", str(first), "--threads", "1")
    assert done.exit_code == 0, done.output
    assert done.output.count("flash_kda refuses: it is not installed (pip install tokenspeed-flashkda)") == 8
    assert "flash_qla" not in done.output
    assert run("bench", "kda", "--suite", "tiny", "--json", str(second), "--peer", "loop", "--threads", "1").exit_code == 0
    again = run("bench", "--from", str(first), "--from", str(second), "--plot", str(tmp_path / "a.png"))
    assert again.exit_code == 0, again.output
    assert again.output.count("  token loop") == again.output.count("  chunkwise") == again.output.count("flash_kda refuses") == 8
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["a-kda-1x3x2x4.png", "a-kda-1x4x2x4.png"]


def test_suites_have_their_own_defaults(run, monkeypatch, tmp_path):
    from penstock.bench.suites import Suite

    rows = tuple(Case(f"{variant}-tiny", variant, Shape(1, 5, 2, 4, 4), "tiny") for variant in ("gla", "rwkv6"))
    tiny = Suite("tiny", "", rows, ("fwd", "fwdbwd"), ("chunkwise",), ("none",), "float64", "cpu", 0.002)
    monkeypatch.setattr("penstock.bench.suites.SUITES", (tiny,))
    numbers = tmp_path / "numbers.json"

    def measured(*words):
        done = run("bench", "--suite", "tiny", "--json", str(numbers), "--threads", "1", *words)
        assert done.exit_code == 0, done.output
        content = json.loads(numbers.read_text())["measurements"]
        return [(one["case"], one["mode"], one["dtype"], [timing["candidate"] for timing in one["timings"]]) for one in content]

    assert measured() == [(f"{name}-tiny", mode, "float64", ["chunkwise"]) for mode in ("fwd", "fwdbwd") for name in ("gla", "rwkv6")]
    given = ["--mode", "fwd", "--dtype", "float32", "--impl", "reference"]
    assert measured("gla", *given) == [("gla-tiny", "fwd", "float32", ["reference"])]
    done = run("bench", "rwkv5", "--suite", "tiny")
    assert done.exit_code == 2
    assert "variant must be one of suite tiny, got 'rwkv5'" in done.output


def test_a_refusing_peer_does_not_end_the_run(run, monkeypatch):
    from penstock.bench.candidates import Candidate

    def refusing(*_):
        raise RuntimeError("not on this GPU")

    monkeypatch.setattr(BENCH, "peer", lambda *_: Candidate("fla", refusing, refusing, lambda *_: 1.0))
    done = run("bench", "gla", "rwkv6", *TINY)
    assert done.exit_code == 0, done.output
    assert done.output.count("fla refuses: RuntimeError: not on this GPU") == 2
    assert done.output.count("auto (") == 2


def test_wrong_results_set_the_exit_code(run, monkeypatch, tmp_path):
    own = BENCH.raw.own

    def tampered(name, x, mode):
        right = own(name, x, mode)
        return replace(right, forward=lambda x: right.forward(x) * 1.01) if x.variant == "gla" else right

    monkeypatch.setattr(BENCH.raw, "own", tampered)
    done = run("bench", "gla", "rwkv6", *TINY, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 1
    assert "wrong: its output is 0.0" in done.output
    content = json.loads((tmp_path / "a.json").read_text())["measurements"]
    assert [(len(one["timings"]), len(one["untimed"])) for one in content] == [(1, 1), (2, 0)]


def test_a_failing_case_does_not_end_the_others(run, monkeypatch):
    measure = BENCH.measure

    def all_but_gla(name, x, *rest, **options):
        if x.variant == "gla":
            raise torch.OutOfMemoryError("no memory left")
        return measure(name, x, *rest, **options)

    monkeypatch.setattr(BENCH, "measure", all_but_gla)
    done = run("bench", "gla", "rwkv6", *TINY)
    assert done.exit_code == 1
    assert "was not measured: OutOfMemoryError: no memory left" in done.output
    assert done.output.count("auto (") == 1


def test_an_interrupted_run_keeps_its_measurements(run, monkeypatch, tmp_path):
    measure = BENCH.measure

    def until_rwkv6(name, x, *rest, **options):
        if x.variant == "rwkv6":
            raise KeyboardInterrupt
        return measure(name, x, *rest, **options)

    monkeypatch.setattr(BENCH, "measure", until_rwkv6)
    assert run("bench", "gla", "rwkv6", *TINY, "--json", str(tmp_path / "a.json")).exit_code != 0
    assert [one["variant"] for one in json.loads((tmp_path / "a.json").read_text())["measurements"]] == ["gla"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rwkv9"], "variant must be one of linear_attention"),
        (["rwkv6", "--mode", "backward"], "mode must be one of fwd, fwdbwd, decode, got 'backward'"),
        (["rwkv6", "--impl", "fast"], "impl must be one of auto, cpu"),
        (
            ["rwkv6", "--peer", "flash"],
            "peer must be one of loop, fla, fla_recurrent, rung-atomics, rung-register, rung-wide, rung-block, rung-shared, none",
        ),
        (["rwkv6", "--dtype", "int8"], "dtype must be one of float16"),
        (["rwkv6", "--device", "tpu"], "device must be cpu, cuda or cuda:N"),
        (["rwkv6", "--device", "cuda:99"], "device must be one that torch can use"),
        (["wkv-ladder", "--device", "cuda:99"], "device must be one that torch can use"),
        (["wkv-ladder", "--device", "cpu"], "rung-atomics cannot be timed here"),
        (["rwkv6", "--shape", "1,2,x,4"], "shape must be B,T,H,K or B,T,H,K,V"),
        (["rwkv6", "--case", "rwkv6-1.6"], "that penstock bench --list shows, got 'rwkv6-1.6'. Did you mean rwkv6-1.6b?"),
        (["rwkv6", "--case", "gla-1.3b"], "case must be a shape of rwkv6"),
        (["--case", "gla-1.3b", "--shape", "1,2,3,4"], "variant must be given with --shape"),
        ([], "variant must be given"),
        (["softmax_attention", "--mode", "fwd", "--mode", "decode"], "mode must be fwd or fwdbwd for softmax_attention, got 'decode'"),
        (["rwkv6", "--case", "rwkv6-7b", "--mode", "decode"], "T must be at most 16 in mode decode"),
        (["--suite", "everything"], "suite must be one of gpu-training, gates, gpu-decode, delta-gates, delta-gates-cpu, lengths, softmax"),
        (["rwkv6", "--from", "a.json"], "--from must be given without variants"),
        (["--from", "a.json", "--seconds", "1"], "--from must be given without variants and with no option but --plot"),
        (["softmax_attention", "--impl", "cpu"], "impl must be one of auto, triton, sdpa, reference for softmax_attention, got 'cpu'"),
        (["softmax_attention", "--peer", "loop"], "peer must be one of sdpa, none for softmax_attention, got 'loop'"),
        (["softmax_attention", "--shape", "1,20,2,8,16"], "shape must be one of equal K and V for softmax_attention, got 1,20,2,8,16"),
        (["--suite", "softmax", "--impl", "cpu", "--device", "cpu"], "impl must be one of auto, triton, sdpa, reference for softmax"),
        (["gla", "--impl", "triton"], "impl must be one of auto, cpu, cuda,"),
        (["gated_delta_rule", "--impl", "raw"], "got 'raw'"),
        (["gla", "--peer", "sdpa"], "peer must be one of loop, fla"),
        *(
            (["gla", "--seconds", value], f"seconds must be a finite number above 0, got {value}")
            for value in ("nan", "inf", "0.0", "-1.0")
        ),
        (["gla", "--seed", "-1"], "seed must be from 0 to 9223372036854775807, got -1"),
        (["gla", "--seed", "99999999999999999999"], "seed must be from 0 to"),
        (["gla", "--threads", "1000000000000"], "--threads"),
        (["gla", "--threads", "0"], "--threads"),
        (["gla", "--device", "cpu:"], "device must be cpu, cuda or cuda:N, got 'cpu:'"),
        (["gla", "--device", "cuda:"], "device must be cpu, cuda or cuda:N, got 'cuda:'"),
        (["gla", "--device", "cuda:01"], "device must be cpu, cuda or cuda:N, got 'cuda:01'"),
        (["gla", "--shape", "1,2,3,99999999999999999999"], "shape must be B,T,H,K or B,T,H,K,V, whole numbers of at least 1"),
        (["gla", "--shape", "999999999,999999999,3,4"], "shape must be one whose B * T * H * K * V is below 2**56"),
        (["gla", "--shape", "9" * 5000 + ",1,1,1"], "shape must be B,T,H,K or B,T,H,K,V"),
        (["--from", "."], "file must be a record that penstock bench --json wrote, got '.'"),
        (["--from", "no-such.json"], "file must be a record that penstock bench --json wrote, got 'no-such.json'"),
        (["rwkv6", "--plot", "picture.doc"], "file must be named *.png"),
        (["rwkv6", *TINY, "--peer", "fla"], "peer fla cannot be timed here"),
        (["rwkv6", *TINY, "--impl", "cpu", "--dtype", "float64"], "impl must be one that takes this call"),
    ],
)
def test_wrong_options_give_one_message(run, words, message):
    done = run("bench", *words)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert message in done.output


def test_wrong_modes_are_found_before_any_case_is_measured(run, monkeypatch):
    monkeypatch.setattr(BENCH, "measure", lambda *_, **__: pytest.fail("a case was measured"))
    done = run("bench", "--case", "rwkv6-7b", "--mode", "fwd", "--mode", "decode")
    assert done.exit_code == 2
    assert "T must be at most 16 in mode decode" in done.output
