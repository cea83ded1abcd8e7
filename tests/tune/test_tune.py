"""Launch tables, and ``penstock tune`` with fake times. Kernels run under the interpreter."""

import json

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import main
from penstock.cli.tune import entry_of, print_tuned
from penstock.errors import PenstockError, RangeError
from penstock.gpu import launch
from penstock.gpu.target import Target
from penstock.recurrence.triton import table_file
from penstock.recurrence.triton.calls import Call
from penstock.recurrence.triton.table import KernelConfig, Key, by_rule, config
from penstock.recurrence.triton.table_file import Entry
from penstock.recurrence.triton.tuning import SPACE, TUNING, candidates
from penstock.tokens.shape import Shape
from penstock.tune import trial
from penstock.tune.launch_tables import table_lines
from penstock.tune.passes import without_memory
from penstock.tune.tune import Outcome, Tuned, Tuner, judged
from penstock.tune.workers import Failure

KEY = Key("forward", "channel", "updated", "bf16", 64, 64)
ENTRY = Entry(
    KEY, KernelConfig(8, C=16, stages=2, programs_per_sm=7), 0.5, "gla 1,2,3,64 bfloat16 forward", "a GPU", "triton 9", "2030-01-01"
)
TARGET = Target("sm_90", 132, 227 << 10)
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's table for sm_90, in a temporary folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table_file.in_use.cache_clear()
    yield tmp_path / "penstock" / "launch-sm_90.json"
    table_file.in_use.cache_clear()


def in_use():
    return {key: entry.config for key, entry in table_file.in_use("sm_90").items()}


def forward_config(target, K=64):
    """The block sizes of gla's forward kernel for a head of K key channels."""
    inputs = without_memory("gla", Shape(1, 64, 1, K, 64), torch.bfloat16)
    return config(Call.of(inputs.problem(), target).key("forward"), target)


def test_tables_of_the_user_come_before_shipped_ones_and_rules(own):
    shipped = table_file.shipped("sm_90")
    assert in_use() == {key: entry.config for key, entry in shipped.items()}
    assert forward_config(TARGET) == by_rule(KEY, TARGET)
    assert forward_config(TARGET._replace(table={KEY: KernelConfig(1, C=32)})) == KernelConfig(1, C=32)
    table_file.write(own, "sm_90", [ENTRY])
    assert forward_config(TARGET._replace(table=in_use())) == shipped[KEY].config  # the file is read once in a process
    table_file.in_use.cache_clear()
    found = in_use()
    assert forward_config(TARGET._replace(table=found)) == ENTRY.config
    assert found == {key: entry.config for key, entry in shipped.items()} | {KEY: ENTRY.config}
    assert not table_file.in_use("sm_80")
    assert forward_config(TARGET._replace(table=found), 33) == ENTRY.config  # 33 channels are rounded up
    assert forward_config(TARGET._replace(table=found), 65) != ENTRY.config


def test_check_lists_the_tables_in_use(own, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(Target, "of", lambda device: TARGET)
    count = len(table_file.shipped("sm_90"))
    assert table_lines() == [("sm_90", f"no entries of yours ({own}), then {count} shipped, then by rule")]
    table_file.write(own, "sm_90", [ENTRY])
    assert table_lines() == [("sm_90", f"1 entries of {own}, then {count} shipped, then by rule")]


@pytest.mark.parametrize("path", sorted(table_file.shipped_path("sm_90").parent.iterdir()), ids=lambda path: path.stem)
def test_shipped_tables_are_well_formed(path, tmp_path):
    entries = table_file.read(path, path.stem)
    assert entries
    table_file.write(tmp_path / "again.json", path.stem, entries.values())
    assert (tmp_path / "again.json").read_text() == path.read_text()


def altered(**changes):
    plain = ENTRY.plain | {name: value for name, value in changes.items() if name in ENTRY.plain}
    plain["config"] = plain["config"] | {name: value for name, value in changes.items() if name not in ENTRY.plain} if changes else {}
    return {"arch": "sm_90", "entries": [ENTRY.plain | {"kernel": "states", "config": {"warps": 2}}, plain]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the file must be JSON, got something else: Expecting"),
        ([], "the file must be an object with arch and entries, a list, got []"),
        ({"arch": "sm_90"}, "the file must be an object with arch and entries"),
        ({"arch": "sm_80", "entries": []}, "arch must be 'sm_90', got 'sm_80'"),
        ({"arch": "sm_90", "entries": [3]}, "entries[0] must be an object with exactly kernel, decay"),
        ({"arch": "sm_90", "entries": [ENTRY.plain | {"speed": 1}]}, "entries[0] must be an object with exactly"),
        ({"arch": "sm_90", "entries": [ENTRY.plain, ENTRY.plain]}, "entries must be of different keys, got 2 for forward channel"),
        (altered(kernel="sideways"), "entries[1].kernel must be one of forward, backward, states, recurrent, step, got \"sideways\""),
        (altered(decay="strong"), "entries[1].decay must be one of none, scalar, channel"),
        (altered(K=100), "entries[1].K must be a power of two from 16 to 512, got 100"),
        (altered(milliseconds=0), "entries[1].milliseconds must be a number above 0, got 0"),
        (altered(gpu=""), "entries[1].gpu must be a text"),
        (altered(), "entries[1].config must be an object with at least warps, got {}"),
        (altered(C=48), "entries[1].config.C must be a power of two from 16 to 256, got 48"),
        (altered(kernel="states", C=64), "entries[1].config.C must be 0: this kernel has no chunks of its own, got 64"),
        (altered(warps=True), "entries[1].config.warps must be a power of two from 1 to 32, got true"),
        (altered(stages=0), "entries[1].config.stages must be a whole number from 1 to 8, got 0"),
        (altered(BX=1), "entries[1].config.BX must be left out, being none of warps, BV"),
    ],
)  # fmt: skip
def test_malformed_tables_are_refused_with_file_entry_and_rule(own, content, message):
    own.parent.mkdir()
    own.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(PenstockError) as caught:
        table_file.in_use("sm_90")
    assert str(caught.value).startswith(f"launch table {own}: {message}")
    assert str(caught.value).endswith("penstock tune writes a new one.")


def test_every_broken_rule_is_listed(own):
    table_file.write(own, "sm_90", [ENTRY._replace(config=KernelConfig(3, C=16, stages=9))])
    with pytest.raises(RangeError, match=r"(?s)config\.warps.*config\.stages"):
        table_file.in_use("sm_90")


def outcomes(*found):
    return tuple(judged(KernelConfig(warps), answer) for warps, answer in found)


def test_wrong_and_failing_candidates_are_never_chosen():
    found = outcomes((1, (0.1, 0.5, 0.2)), (2, Failure("illegal access")), (4, (0.3, 0.1, 0.2)), (8, (0.4, 0.1, 0.2)))
    tuned = Tuned(KEY, "a call", KernelConfig(8), found)
    assert tuned.chosen == found[2]
    assert found[0].reason == "wrong: error 0.5, allowed 0.2"
    assert found[1].reason == "illegal access"
    assert judged(KernelConfig(1), (0.1, float("nan"), 0.2)).reason is not None
    assert Tuned(KEY, "a call", KernelConfig(1), found[:2]).chosen is None
    assert entry_of(Tuned(KEY, "a call", KernelConfig(1), found[:2]), DEVICE, Entry) is None


def test_sizes_in_use_stay_unless_others_are_clearly_faster():
    before, faster = (4, (1.0, 0.0, 1.0)), 1.0 / 1.02
    assert Tuned(KEY, "", KernelConfig(4), outcomes(before, (8, (0.995, 0.0, 1.0)))).chosen.config == KernelConfig(4)
    assert Tuned(KEY, "", KernelConfig(4), outcomes(before, (8, (faster, 0.0, 1.0)))).chosen.config == KernelConfig(8)
    wrong = (4, (1.0, 2.0, 1.0))
    assert Tuned(KEY, "", KernelConfig(4), outcomes(wrong, (8, (5.0, 0.0, 1.0)))).chosen.config == KernelConfig(8)


def fake(times, seen):
    """Fake measurements: milliseconds by block sizes. Candidates with 8 warps are the fastest, and wrong."""

    def measure(given, found):
        seen.append(given)
        for one in found:
            yield (0.01, 9.0, 1.0) if one.warps == 8 else (times(given.key.kernel, one), 0.0, 1.0)

    return measure


def test_kernels_are_tuned_in_turn_with_earlier_choices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    seen, tried = [], []

    def prepare(tuner, which, key, found):
        tried.append((key.kernel, len(found)))
        return ["does not compile: no" if one.stages == 1 and key.kernel == "forward" else None for one in found]

    def times(kernel, one):
        return 1.0 + one.C / 64 - one.programs_per_sm / 100 + one.stages

    tuner = Tuner("gla", Shape(8, 2048, 32, 64, 64), torch.bfloat16, "cuda:0", TARGET, prepare=prepare, measure=fake(times, seen))
    found = {tuned.key.kernel: tuned for tuned in tuner.run()}
    assert list(found) == [kernel for kernel, _ in TUNING.kernels]
    assert found["forward"].chosen.config == KernelConfig(4, BV=64, BK=64, C=16, stages=2, programs_per_sm=4)
    assert found["backward"].chosen.config.C == 16
    assert found["recurrent"].call == "gla 8,8,32,64 bfloat16 short backward"
    assert found["step"].call == "gla 64,1,32,64 bfloat16 step"
    assert [kernel for kernel, _ in tried] == ["forward", "forward", "backward", "states", "states", "recurrent", "step"]
    assert all(one.reason for one in found["forward"].outcomes if one.config.warps == 8 or one.config.stages == 1)
    others = next(given for given in seen if given.key.kernel == "states").other_configs
    assert others == {found[name].key: found[name].chosen.config for name in ("forward", "backward")}
    entry = entry_of(found["forward"], DEVICE, Entry)
    assert (entry.config, entry.gpu, entry.milliseconds) == (found["forward"].chosen.config, "a GPU", 3.21)


@pytest.mark.parametrize("kernel", SPACE)
def test_candidates_are_no_wider_than_the_head(kernel):
    before = KernelConfig(4, C=64, programs_per_sm=3)
    found = candidates(Key(kernel, "none", "updated", "bf16", 64, 64), before)
    assert len(set(found)) == len(found) > 3
    assert all(one.BV <= 64 and one.BK <= 64 and one.programs_per_sm == 3 for one in found)
    wide = candidates(Key(kernel, "none", "updated", "bf16", 256, 512), before)
    assert set(found) <= set(wide)
    assert (len(wide) > len(found)) == (max(size for name in ("BV", "BK") for size in SPACE[kernel].get(name, (0,))) > 64)


@pytest.mark.parametrize(("kernel", "which"), TUNING.kernels)
@pytest.mark.parametrize("variant", ["gla", "rwkv5"])
def test_trials_run_candidates_and_compare_with_exact_results(variant, kernel, which, monkeypatch):
    shape = Shape(1, {"step": 1, "recurrent": 17}.get(kernel, 40), 1, 16, 16)
    tuner = Tuner(variant, shape, torch.float32, "cpu", Target.of(torch.device("cpu")))
    key, before = tuner.in_use(kernel, which)
    given = trial.Trial(variant, shape, torch.float32, "cpu", 0, which, key, {})
    planned, made = [], launch.Prepared

    def noted(plan, *rest):
        planned.append({dict(launch.options)["num_warps"] for launch in plan.launches})
        return made(plan, *rest)

    monkeypatch.setattr(launch, "Prepared", noted)
    tried = trial.prepared(given, lambda call, device: 3.0 if call() is not None else 0.0)
    answers = [tried(before._replace(warps=16)), tried(before)]
    assert [answer.milliseconds for answer in answers] == [3.0, 3.0]
    assert all(judged(before, answer).reason is None for answer in answers), answers
    assert 16 in planned[0]
    assert 16 not in planned[-1]
    assert launch._trial is None
    exact = trial._in_place if which == "step" else trial._pass

    def off(given):
        ready = exact(given)
        return ready._replace(exact={name: x + 0.01 * x.abs().max() for name, x in ready.exact.items()})

    monkeypatch.setattr(trial, "_in_place" if which == "step" else "_pass", off)
    assert judged(before, trial.prepared(given, lambda call, device: 3.0)(before)).reason.startswith("wrong: error 0.0")


def test_candidates_are_printed(capsys):
    from rich.console import Console

    found = outcomes((1, (0.1, 0.5, 0.2)), (4, (0.3, 0.1, 0.2)), (2, (0.2, 0.1, 0.2)))
    print_tuned(Console(width=140), Tuned(KEY, "a call", KernelConfig(4), found))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0][:3] == ["forward:", "a", "call"]
    assert [line[2] for line in lines[-3:]] == ["2", "4", "1"]
    assert lines[-3][-1] == "chosen"
    assert lines[-2][-2:] == ["in", "use"]
    assert "wrong:" in lines[-1]
    print_tuned(Console(width=140), Tuned(KEY, "a call", KernelConfig(4), found[:1]))
    assert "WRONG: no candidate of forward channel updated bf16 64 64 is right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rwkv9"], "variant must be one of linear_attention"),
        (["gla", "--dtype", "float64"], "dtype must be one of bfloat16, float16, float32, got 'float64'"),
        (["gla", "--device", "cpu"], "device must be cuda or cuda:N, got 'cpu'"),
        (["gla", "--device", "cuda:99"], "device must be one that torch can use"),
        (["gla", "--device", "cuda:"], "device must be cuda or cuda:N, got 'cuda:'"),
        (["gla", "--seed", "-1"], "tune: seed must be from 0 to"),
        (["gla", "--shape", "999999999,999999999,3,4"], "tune: shape must be one whose B * T * H * K * V is below 2**56"),
        (["gla", "--shape", "1,2,x,4"], "tune: shape must be B,T,H,K or B,T,H,K,V"),
        (["gla", "--shape", "1,2,3,64", "--shape", "8,2,3,63"], "shape must be the only one of its K and V"),
        (["gla", "--shape", "1,2,3,512"], "shape must be of at most K = 256 and V = 512, got 1,2,3,512"),
    ],
)
def test_wrong_options_give_one_message(words, message):
    done = CliRunner().invoke(main, ["tune", *words])
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_tune_has_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    done = CliRunner().invoke(main, ["tune", "--help"])
    assert done.exit_code == 0
    assert "Examples" in done.output


def test_tune_adds_to_a_table(own, monkeypatch, tmp_path):
    """The command with a fake GPU: its name, type and times."""
    other = ENTRY._replace(key=KEY._replace(K=128))
    file = tmp_path / "table.json"
    table_file.write(file, "sm_90", [other, ENTRY])
    monkeypatch.setattr("penstock.tune.ahead.check_compiler", lambda function: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    monkeypatch.setattr(Target, "of", lambda device: TARGET)
    best = Outcome(KernelConfig(4, C=64, stages=2, programs_per_sm=1), 0.125, 1e-3, None)

    def run(tuner):
        assert (tuner.variant, tuner.shape.text, tuner.device, tuner.seed) == ("gla", "2,64,3,64", "cuda:0", 5)
        yield Tuned(KEY, "gla 2,64,3,64 bfloat16 forward", ENTRY.config, (best,))
        yield Tuned(KEY._replace(kernel="states"), "gla", KernelConfig(2), (Outcome(KernelConfig(2), None, None, "broken"),))

    monkeypatch.setattr(Tuner, "run", run)
    words = ["tune", "gla", "--shape", "2,64,3,64", "--device", "cuda:0", "--seed", "5"]
    done = CliRunner().invoke(main, [*words, "--write", str(file)])
    assert done.exit_code == 0, done.output
    found = table_file.read(file, "sm_90")
    assert set(found) == {KEY, other.key}
    assert found[other.key] == other
    assert (found[KEY].config, found[KEY].gpu, found[KEY].milliseconds) == (best.config, "Fake GPU", 0.125)
    assert "torch" in found[KEY].versions
    assert not own.exists()
    assert CliRunner().invoke(main, [*words, "--dry"]).exit_code == 0
    assert not own.exists()
    assert CliRunner().invoke(main, words).exit_code == 0
    assert set(table_file.read(own, "sm_90")) == {KEY}
    own.write_text("{}")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert str(own) in done.output
