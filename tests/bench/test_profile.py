"""Profiles: counts from traces, output files, and that wrong candidates are not profiled."""

import json
import os
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from measurements import SMALL, wrong
from torch.profiler import ProfilerActivity
from typer.testing import CliRunner

from penstock import DeviceError, ImplementationRefused
from penstock.bench import plot, trace
from penstock.bench.candidates import Candidate, loop, ours
from penstock.bench.loop import token_loop
from penstock.bench.plot import plot_profile
from penstock.bench.profile import MODES, candidates, hidden, profiled
from penstock.bench.record import Record
from penstock.bench.trace import ON_GPU, WAIT, WARM_UP, read, record
from penstock.cli import main
from penstock.errors import MissingExtra, installing
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify import oracle
from penstock.verify.inputs import Inputs, inputs

CPU = torch.device("cpu")
TINY = ["--heads", "2", "--length", "5", "--head-dim", "4", "--seconds", "0.002", "--threads", "1", "--steps", "2"]
NATIVE = pytest.mark.skipif(FAMILY.named("cpu").available() is not None, reason="no native kernels here")


def one(folder, pattern="*.pt.trace.json"):
    (path,) = folder.rglob(pattern)
    return path


def written(path, events):
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


COPY = "void at::native::elementwise_kernel<4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#1}>(int)"
GPU_TRACE = [
    event("user_annotation", "ProfilerStep#2", 0, 1000),
    event("cpu_op", "aten::contiguous", 10, 100),
    event("cpu_op", "aten::clone", 20, 80),
    event("cpu_op", "aten::copy_", 30, 60),
    event("cuda_runtime", "cudaLaunchKernel", 40, 5, correlation=7),
    event("kernel", COPY, 300, 4, tid=77, correlation=7),
    event("cuda_driver", "cuLaunchKernelEx", 150, 5, correlation=8),  # a Triton kernel: no operator around it
    event("kernel", "recurrent_forward", 310, 20, tid=77, correlation=8),
    event("cpu_op", "aten::zero_", 160, 20),
    event("cuda_runtime", "cudaMemsetAsync", 165, 5, correlation=9),
    event("gpu_memset", "Memset (Device)", 340, 2, tid=77, correlation=9),
    event("user_annotation", "ProfilerStep#3", 1000, 3000),
    event("cpu_op", "aten::add", 1000, 90, tid=2),  # autograd's thread
    event("cuda_runtime", "cudaMemcpyAsync", 1010, 5, tid=2, correlation=10),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1500, 6, tid=77, correlation=10),
    event("cuda_driver", "cuLaunchKernelEx", 1150, 5, correlation=11),
    event("kernel", "recurrent_forward", 1600, 30, tid=77, correlation=11),
    event("gpu_user_annotation", "ProfilerStep#3", 1500, 200, tid=77),
    event("cuda_runtime", "cudaDeviceSynchronize", 1700, 100, correlation=12),
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 77, "ts": 300, "id": 7},
]


def test_gpu_traces_are_counted_by_kernel_and_by_launching_operator(tmp_path):
    found = read(written(tmp_path / "a.json", GPU_TRACE), gpu=True)
    assert found.calls == 2
    assert found.milliseconds == pytest.approx(2)
    assert found.kernel_milliseconds == pytest.approx((4 + 20 + 2 + 6 + 30) / 2 * 1e-3)
    assert (found.slowest, found.slowest_milliseconds) == ("recurrent_forward", pytest.approx(25e-3))
    assert found.launches == 5 / 2
    assert found.layout_milliseconds == pytest.approx((4 + 6) / 2 * 1e-3)


def test_torch_kernels_are_named_with_their_operator(tmp_path):
    events = [one for one in GPU_TRACE if one["name"] != "recurrent_forward"]
    assert read(written(tmp_path / "a.json", events), gpu=True).slowest == "Memcpy DtoD (aten::add)"
    events = [one for one in events if one["cat"] != "gpu_memcpy"]
    assert read(written(tmp_path / "a.json", events), gpu=True).slowest == "elementwise_kernel (aten::copy_)"


def test_a_trace_without_gpu_work_gives_no_profile(tmp_path):
    events = [one for one in GPU_TRACE if one["cat"] not in ON_GPU]
    assert read(written(tmp_path / "a.json", events), gpu=True) is None


def test_operators_are_counted_once_by_self_time(tmp_path):
    events = [
        event("user_annotation", "ProfilerStep#2", 0, 1000),
        event("cpu_op", "Recurrence", 5, 900),  # an autograd node is not an operator
        event("user_annotation", "penstock::cpu_forward", 10, 500),
        event("cpu_op", "autograd::engine::evaluate_function: CopyBackward", 520, 100),
        event("cpu_op", "aten::contiguous", 530, 50),
        event("cpu_op", "aten::copy_", 540, 30),
        event("cpu_op", "aten::bmm", 700, 40),
        event("cpu_op", "aten::as_strided", 740, 1),  # starts at the end of the other: not inside it
    ]
    found = read(written(tmp_path / "a.json", events), gpu=False)
    assert found.kernel_milliseconds == pytest.approx(0.5 + 0.02 + 0.03 + 0.04 + 0.001)
    assert (found.slowest, found.slowest_milliseconds) == ("penstock::cpu_forward", 0.5)
    assert found.launches == 4  # contiguous calls another operator
    assert found.layout_milliseconds == pytest.approx(0.03)


def test_traces_hold_the_requested_steps(tmp_path):
    called = []

    def call():
        called.append(torch.ones(5).cumsum(0))

    record(call, CPU, 3, tmp_path / "deep" / "a.pt.trace.json")
    assert len(called) == WAIT + WARM_UP + 3
    events = json.loads((tmp_path / "deep" / "a.pt.trace.json").read_text())["traceEvents"]
    names = [one["name"] for one in events if one["ph"] == "X"]
    assert [name for name in names if name.startswith("ProfilerStep#")] == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert names.count("aten::cumsum") == 3
    assert all(one["dur"] >= 0 for one in events if one["ph"] == "X")


def test_profiler_messages_are_hidden_and_errors_are_not(tmp_path, capfd, monkeypatch):
    """Kineto writes to the file descriptor, past sys.stderr."""
    starts = trace.profile.start_trace

    def start_trace(profiler):
        starts(profiler)
        os.write(2, b"USDT:2026-11-22 01:58:23 1:1 Handler.cpp:52] profiler_start\nERROR:2026-11-22 a real one\nwithout an end")

    monkeypatch.setattr(trace.profile, "start_trace", start_trace)
    record(lambda: torch.ones(5).cumsum(0), CPU, 1, tmp_path / "a.pt.trace.json")
    os.write(2, b" and later\n")
    assert capfd.readouterr().err == "ERROR:2026-11-22 a real one\nwithout an end and later\n"


def test_stderr_is_restored_when_the_profiler_fails(tmp_path, capfd, monkeypatch):
    def stop_trace(profiler):
        os.write(2, b"why\n")
        raise RuntimeError("no trace")

    monkeypatch.setattr(trace.profile, "stop_trace", stop_trace)
    with pytest.raises(RuntimeError, match="no trace"):
        record(lambda: torch.ones(5).cumsum(0), CPU, 1, tmp_path / "a.pt.trace.json")
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "why\nlater\n"


@pytest.mark.parametrize("mode", MODES)
def test_profile_times_are_consistent(mode, tmp_path):
    x = hidden(inputs("rwkv6", SMALL))
    found = profiled("small", x, mode, [loop(x), ours("chunkwise", x, mode)], tmp_path, 0.002, 2)
    assert [timing.candidate for timing in found.timings] == ["token loop", "chunkwise"]
    for timing, folder in zip(found.timings, ("token_loop", "chunkwise")):
        seen = timing.profile
        assert seen.trace == str(one(tmp_path / folder))
        assert 0 < seen.slowest_milliseconds <= seen.kernel_milliseconds <= seen.milliseconds
        assert 0 < seen.layout_milliseconds < seen.kernel_milliseconds
        assert seen.calls == 2
        assert seen.launches == int(seen.launches) > SMALL.T
    own = [event["dur"] for event in json.loads(one(tmp_path / "chunkwise").read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    assert found.timings[1].profile.kernel_milliseconds < sum(own) * 1e-3  # the sum counts nested operators twice


@NATIVE
def test_native_kernels_appear_in_profiles_only(tmp_path, monkeypatch):
    x = hidden(inputs("gla", Shape(1, 400, 4, 64, 64)))  # takes milliseconds, so overheads are negligible
    profile = profiled("small", x, "fwdbwd", [ours("cpu", x, "fwdbwd")], tmp_path, 0.002, 2).timings[0].profile
    assert profile.slowest == "penstock::cpu_backward"
    names = [one["name"] for one in json.loads(one(tmp_path).read_text())["traceEvents"]]
    assert names.count("penstock::cpu_forward") == names.count("penstock::cpu_backward") == 2
    monkeypatch.setattr("penstock.cpu.record_function", lambda name: pytest.fail("a range without a profiler"))
    x.run("cpu")


@NATIVE
@pytest.mark.parametrize(("variant", "mode"), [*((variant, "fwd") for variant in VARIANTS), ("gla", "fwdbwd")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_model_layouts_are_not_converted(variant, mode, dtype, tmp_path):
    x = hidden(inputs(variant, Shape(2, 9, 2, 8, 8), dtype))
    assert profiled("small", x, mode, [ours("cpu", x, mode)], tmp_path, 0.001, 1).timings[0].profile.layout_milliseconds == 0


def test_layout_conversions_are_found(tmp_path):
    def straight(x: Inputs) -> torch.Tensor:
        return x.run("cpu" if FAMILY.named("cpu").available() is None else "reference")

    def through_heads_first(x: Inputs) -> torch.Tensor:
        q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (x.q, x.k, x.v))
        return straight(replace(x, q=q, k=k, v=v))

    x = hidden(inputs("gla", Shape(1, 64, 4, 16, 16)))
    both = [Candidate(name, forward, token_loop, oracle.budget) for name, forward in (("a", straight), ("b", through_heads_first))]
    first, second = (timing.profile for timing in profiled("small", x, "fwd", both, tmp_path, 0.001, 2).timings)
    names = [one["name"] for one in json.loads(one(tmp_path / "b").read_text())["traceEvents"]]
    assert names.count("aten::contiguous") == 3 * 2
    assert second.layout_milliseconds > first.layout_milliseconds


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_inputs_are_views_of_projections(variant):
    x = inputs(variant, SMALL)
    made = hidden(x)
    for name, tensor in made.tensors.items():
        assert torch.equal(tensor, x.tensors[name])
        if tensor.ndim == 4:
            B, T, H, n = tensor.shape
            assert tensor._base.shape == (B, T, H * n)
            assert tensor.data_ptr() == tensor._base.data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_wrong_candidates_are_neither_timed_nor_profiled(mode, tmp_path):
    x = hidden(inputs("rwkv6", SMALL))
    found = profiled("small", x, mode, [wrong(mode), ours("chunkwise", x, mode)], tmp_path, 0.001, 1)
    assert [timing.candidate for timing in found.timings] == ["chunkwise"]
    assert found.untimed[0].candidate == "wrong"
    assert found.untimed[0].reason.startswith("wrong: its ")
    assert [path.name for path in tmp_path.iterdir()] == ["chunkwise"]


def test_end_to_end_times_are_taken_without_the_profiler(tmp_path):
    profiling = []

    def forward(x: Inputs) -> torch.Tensor:
        profiling.append(torch.autograd._profiler_enabled())
        return token_loop(x)[0]

    x = hidden(inputs("gla", SMALL))
    candidate = Candidate("a", forward, token_loop, loop(x).budget)
    timing = profiled("small", x, "fwd", [candidate], tmp_path, 0.002, 4).timings[0]
    assert sum(profiling) == 4
    assert all(profiling[-4:])
    assert len(profiling) > timing.samples + WAIT + WARM_UP + 4


def test_default_candidates_are_all_that_take_the_call(at_full_speed):
    x = inputs("rwkv6", SMALL, torch.float64)
    taken, refused = candidates(x, "fwdbwd", [], [])
    assert [one.name for one in taken] == ["token loop", "chunkwise", "parallel", "reference"]
    reasons = {one.candidate: one.reason for one in refused}
    assert set(reasons) == {"cpu", "cuda", "fla", "fla_recurrent"}
    assert "float64" in reasons["cpu"] or FAMILY.named("cpu").available()
    assert "fla" in reasons["fla"] or "GPU" in reasons["fla"]
    assert not any(one.fault for one in refused)


def test_named_candidates_run_or_raise():
    x = inputs("rwkv6", SMALL, torch.float64)
    taken, refused = candidates(x, "fwd", ["reference", "reference", "auto"], ["none"])
    assert [one.name for one in taken] == ["reference", "auto (chunkwise)"]
    assert refused == []
    with pytest.raises(ImplementationRefused, match="impl must be one that takes this call"):
        candidates(x, "fwd", ["cpu"], ["none"])
    with pytest.raises(ImplementationRefused, match="peer fla_recurrent cannot be timed here"):
        candidates(x, "fwd", ["reference"], ["fla_recurrent"])


def test_a_device_without_traced_kernels_is_an_error(tmp_path, monkeypatch):
    x = hidden(inputs("gla", SMALL))
    monkeypatch.setattr(trace, "read", lambda path, gpu: None)
    with pytest.raises(DeviceError, match=r"profile: device must be one whose kernels torch.profiler sees, got cpu"):
        profiled("small", x, "fwd", [ours("chunkwise", x, "fwd")], tmp_path, 0.001, 1)


def test_steps_on_a_gpu_are_synchronized(tmp_path, monkeypatch):
    order, requested, profiler = [], [], trace.Profiler

    def on_the_cpu_only(activities, **options):
        requested.extend(activities)
        return profiler(activities=[ProfilerActivity.CPU], **options)

    monkeypatch.setattr(trace, "on_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: order.append("wait"))
    monkeypatch.setattr(trace, "Profiler", on_the_cpu_only)
    record(lambda: order.append("call"), CPU, 2, tmp_path / "a.json")
    assert requested == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert [what for what in order if what == "call"] == ["call"] * (WAIT + WARM_UP + 2)
    assert all(following == "wait" for what, following in pairwise(order) if what == "call")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *words: CliRunner().invoke(main, ["profile", *words])


@pytest.mark.parametrize("mode", MODES)
def test_command_prints_and_writes(run, mode, tmp_path, at_full_speed):
    numbers, folder = tmp_path / "numbers.json", tmp_path / "deep" / "profile"
    words = ["rwkv6", *TINY, "--value-dim", "6", "--dtype", "float32", "--device", "cpu", "--mode", mode]
    done = run(*words, "--output", str(folder), "--json", str(numbers))
    assert done.exit_code == 0, done.output
    for word in (f"rwkv6, {mode}, float32 on cpu, 1 thread", "1,5,2,4,6", "token loop", "slowest operator", "layout", "fla refuses: it "):
        assert word in done.output
    (found,) = Record.read(numbers).measurements
    assert (found.mode, found.shape, found.first) == (mode, Shape(1, 5, 2, 4, 6), "token loop")
    assert {one.candidate for one in found.untimed} >= {"fla", "fla_recurrent"}
    for timing in found.timings:
        assert timing.profile.calls == 2
        assert json.loads(one(folder / timing.candidate.replace(" ", "_")).read_text())["traceEvents"]
    assert (folder / "profile.png").read_bytes()[:4] == b"\x89PNG"


def test_wrong_results_set_the_exit_code(run, monkeypatch, tmp_path):
    module = sys.modules["penstock.cli.profile"]  # its package has the command under the same name
    own_wrong = replace(wrong("fwd"), ours=True)
    monkeypatch.setattr(module, "candidates", lambda x, *_: ([loop(x), own_wrong], []))
    done = run("gla", *TINY, "--dtype", "float32", "--device", "cpu", "--output", str(tmp_path))
    assert done.exit_code == 1, done.output
    assert "wrong wrong: its output is 0.0001 from the float64 token loop" in done.output


def test_without_matplotlib_only_the_picture_is_missing(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run("gla", *TINY, "--impl", "chunkwise", "--device", "cpu", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert installing("plot") in done.output
    assert one(tmp_path / "chunkwise").exists()
    with pytest.raises(MissingExtra):
        plot_profile(None, tmp_path / "a.png")


def test_picture_shows_both_times_of_every_candidate(tmp_path, monkeypatch):
    x = hidden(inputs("gla", SMALL))
    found = profiled("small", x, "fwd", [loop(x), ours("chunkwise", x, "fwd")], tmp_path, 0.001, 1)
    figures, save = [], plot.save
    monkeypatch.setattr(plot, "save", lambda figure, *rest: figures.append(figure) or save(figure, *rest))
    plot_profile(found, tmp_path / "new" / "a.png", "somewhere")
    (axes,) = figures[0].axes
    wanted = [time for one in found.timings for time in (one.milliseconds, one.profile.kernel_milliseconds)]
    assert [bar.get_width() for bar in axes.patches if bar.get_width()] == wanted
    assert [label.get_text() for label in axes.get_yticklabels()] == ["token loop", "chunkwise"]
    assert (tmp_path / "new" / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rwkv9"], "profile: variant must be one of linear_attention"),
        (["rwkv6", "--mode", "decode"], "profile: mode must be one of fwd, fwdbwd, got 'decode'"),
        (["rwkv6", "--impl", "fast"], "profile: impl must be one of auto, cpu"),
        (["rwkv6", "--peer", "flash"], "profile: peer must be one of loop, fla, fla_recurrent, rung-atomics"),
        (["rwkv6", "--dtype", "int8"], "profile: dtype must be one of float16"),
        (["rwkv6", "--device", "cuda:99"], "profile: device must be one that torch can use"),
        (["rwkv6", *TINY, "--device", "cpu", "--peer", "fla"], "peer fla cannot be timed here"),
        (["rwkv6", "--heads", "0"], "--heads"),
        *(
            (["gla", "--seconds", value], f"profile: seconds must be a finite number above 0, got {value}")
            for value in ("nan", "inf", "0.0")
        ),
        (["gla", "--seed", "-1"], "profile: seed must be from 0 to"),
        (["gla", "--threads", "1000000000000"], "--threads"),
        (["gla", "--device", "cpu:"], "profile: device must be cpu, cuda or cuda:N, got 'cpu:'"),
        (["softmax_attention"], "profile: variant must be one of linear_attention"),
        (["rwkv6", "--output", __file__], "profile: --output must be a folder that can be written"),
    ],
)
def test_wrong_options_give_one_message(run, words, message):
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert message in done.output


def test_calls_that_do_not_fit_in_memory_give_one_message(run, tmp_path):
    done = run("gla", "--batch", str(10**9), "--length", str(10**9), "--device", "cpu", "--output", str(tmp_path / "new"))
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "gla, fwd, 1000000000,1000000000,32,64 was not measured: " in done.output
    assert not (tmp_path / "new").exists()


def test_bench_command_reads_what_profile_wrote(run, tmp_path):
    numbers = tmp_path / "numbers.json"
    assert run("gla", *TINY, "--impl", "chunkwise", "--device", "cpu", "--output", str(tmp_path), "--json", str(numbers)).exit_code == 0
    done = CliRunner().invoke(main, ["bench", "--from", str(numbers), "--plot", str(tmp_path / "again.png")])
    assert done.exit_code == 0, done.output
    assert "slowest operator" in done.output
    assert "of floor" not in done.output
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "profile.png").read_bytes()
