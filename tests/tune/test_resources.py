"""Ahead-of-time compilation of the kernels for absent GPUs, and their resources compared with the record."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from penstock.call import versions
from penstock.cli import main
from penstock.delta.triton import ahead as delta_ahead
from penstock.gpu import hopper
from penstock.gpu.target import Target
from penstock.gpu.targets import SMALL, TARGETS
from penstock.layers.chains import CHAINS
from penstock.layers.examples import Draw
from penstock.layers.triton import launches_for
from penstock.layers.triton.launch import pointwise
from penstock.recurrence.triton import ahead, calls, table
from penstock.recurrence.triton.calls import Call
from penstock.recurrence.triton.forms import groups
from penstock.recurrence.triton.table import KernelConfig, Key
from penstock.recurrence.variants import VARIANTS
from penstock.softmax.triton import ahead as softmax_ahead
from penstock.softmax.triton.portable import forms as softmax
from penstock.tokens.shape import Shape
from penstock.tune import ahead as compile_ahead
from penstock.tune import resources
from penstock.tune.ahead import Resources
from penstock.tune.chains import ChainCall, chain_calls
from penstock.tune.passes import planned, without_memory
from penstock.tune.shipped import configurations, launches
from penstock.tune.workers import Failure

RECORD = resources.RecordedResources.read()
WITH_COMPILER = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
"""The environment of a process in which Triton compiles."""


def penstock(*words):
    return subprocess.run([sys.executable, *words], env=WITH_COMPILER, capture_output=True, text=True, check=False)


OLDER = versions.version("triton") < hopper.GLUON
"""Whether this Triton launches no kernels in Gluon, and compiles for AMD's GPUs only beside ROCm."""
needs_gluon = pytest.mark.skipif(OLDER, reason="the record for Hopper is of kernels in Gluon, which this Triton does not compile")
ARCHS = [pytest.param(arch, marks=needs_gluon) if arch == "sm_90" else arch for arch in TARGETS]


HOPPER = (
    ["sm_90"],
    ["rwkv6 1,1024,32,64 bfloat16", "gla 8,2048,32,64 bfloat16: forward", "chain channel_mix", "chain token_shift bfloat16"],
)
PORTABLE = ["sm_80", "sm_100", "sm_120", *["gfx942"] * (not OLDER)]
ELSEWHERE = (
    PORTABLE,
    ["rwkv6 1,1024,32,64 bfloat16: forward", "rwkv6 1,1024,32,64 bfloat16: step", "chain gated_norm bfloat16: gated_norm:"],
)
MOST = (
    [arch for arch in TARGETS if arch not in SMALL],
    [
        *HOPPER[1],
        "chain ",
        *(f"{call}: backward" for call in ("rwkv6 1,1024,32,64 float32", "gla 1,1024,16,100 bfloat16", "gla 1,8192,32,64 bfloat16")),
    ],
)
"""rwkv6 covers most of the code; gla covers uncut sequences and, with odd head sizes, short chunks. The rest takes minutes."""
EVERY = {
    "penstock_chunk_states", "penstock_chunk_states adjoint", "penstock_segment_sums", "penstock_segment_sums adjoint",
    "penstock_segment_scan", "penstock_chunk_fwd", "penstock_chunk_fwd levels", "penstock_chunk_bwd", "penstock_chunk_bwd levels",
    "penstock_recurrent_fwd", "penstock_recurrent_bwd",
}  # fmt: skip


SELECTIONS = [
    pytest.param([*[HOPPER] * (not OLDER), ELSEWHERE], id="sample"),
    pytest.param([MOST], marks=pytest.mark.slow, id="most"),
]
CHECK = """
import json, sys
from typer.testing import CliRunner
from penstock.cli import main
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, ["check", "--compile", "--json", *words])
    print(json.dumps([done.exit_code, done.stdout]))
"""
"""Runs ``penstock check --compile`` for several selections in one process: imports take longer than the kernels in Triton's cache."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("selections", SELECTIONS)
def test_kernels_compile_as_recorded(selections):
    words = [[*(f"--arch={arch}" for arch in archs), *(f"--only={text}" for text in only)] for archs, only in selections]
    done = penstock("-c", CHECK, json.dumps(words))
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(selections), done.stderr
    wrong = []
    for (archs, only), (code, output) in zip(selections, results):
        content = json.loads(output)
        assert {one["arch"] for one in content["launches"]} == set(archs)
        if only is MOST[1]:
            assert {one["launch"].rpartition(": ")[2] for one in content["launches"]} >= EVERY
        assert (code == 0) == content["ok"] == (not any(one["wrong"] for one in content["launches"]))
        same = content["triton"] == RECORD.triton
        wrong += [one for one in content["launches"] if one["wrong"] or (same and one["found"] != one["recorded"])]
    assert not wrong


@needs_gluon
def test_launches_are_specialised_as_by_triton():
    """Numbers that are 1 or divisible by 16 are specialised; other numbers share one specialisation; some arguments have none."""
    script = """
import torch
from penstock.tune.ahead import distinct
from penstock.gpu.targets import TARGETS
from penstock.recurrence.triton.ahead import CONFIGURATIONS
from penstock.tune.shipped import launches
from penstock.recurrence.triton.portable import recurrent
name, job = next((n, j) for n, j in launches(CONFIGURATIONS[0], TARGETS["sm_90"]) if "step" in n)
def changed(argument, value):
    at = recurrent.penstock_recurrent_fwd.arg_names.index(argument)
    return job._replace(arguments=(*job.arguments[:at], value, *job.arguments[at + 1:]))
strides = [changed("q_b", number) for number in (1024, 2048, 1, 24, 25)]
jobs = [*strides, changed("T", 1), changed("T", 16)]
first = distinct(jobs)
print([jobs.index(first[one]) for one in jobs])
amd = next(j for n, j in launches(CONFIGURATIONS[0], TARGETS["gfx942"]) if "step" in n)
small, large = amd, amd._replace(arguments=(amd.arguments[0]._replace(elements=1 << 31), *amd.arguments[1:]))
print(len(set(distinct([small, large]).values())))
"""
    done = penstock("-c", script)
    assert done.stdout.split("\n")[:2] == ["[0, 0, 2, 3, 3, 0, 0]", "2"], done.stdout + done.stderr


@needs_gluon
def test_numbers_of_tokens_are_not_specialised_in_chains():
    """One code for any number of tokens: what is compiled ahead for few, with one block in a program, is what trains on many."""
    script = """
import importlib, pkgutil
import penstock.layers.triton as package
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    for name, kernel in vars(importlib.import_module(module.name)).items():
        for one in getattr(kernel, "params", ()) if name.startswith("penstock_") else ():
            if one.name in ("R", "M", "P", "each", "tokens") and not (one.is_constexpr or one.do_not_specialize):
                print("wrong", name, one.name)
            elif one.name in ("R", "each"):
                print("right")
"""
    done = penstock("-c", script)
    assert "wrong" not in done.stdout, done.stdout
    assert done.stdout.count("right") > 20, done.stderr


@needs_gluon
def test_far_strides_are_64_bits_in_compiled_kernels():
    """Of inputs, decays and gradients of plain and Hopper kernels; as other kernels they compile. Near strides are 32 bits."""
    script = """
from dataclasses import replace
import torch
from penstock.tune import ahead
from penstock.tune.passes import planned, without_memory
from penstock.gpu.targets import TARGETS
from penstock.tokens.shape import Shape
inputs = without_memory("simple_gla", Shape(64, 1024, 4, 64, 64), torch.bfloat16)
for far in (2**16, 2**26):
    q, g = (x.new_empty(x.shape).as_strided(x.shape, (x.shape[1] * far, far, *x.stride()[2:])) for x in (inputs.q, inputs.g))
    for which in ("forward", "backward", "step"):
        T = 1 if which == "step" else 1024
        given = replace(inputs, q=q[:, :T], k=inputs.k[:, :T], v=inputs.v[:, :T], g=g[:, :T])
        made = planned(which, given, TARGETS["sm_90"])
        for job in ahead.jobs(made, "sm_90"):
            kernel = ahead._compile(job)
            print(far, kernel.name, *(name for name, kind in kernel.src.signature.items() if kind == "i64" and name[1:] != "_b"))
"""
    done = penstock("-c", script)
    found = [line.split() for line in done.stdout.splitlines()]
    near = {"penstock_scalar_fwd_sm90", "penstock_chunk_states", "penstock_scalar_bwd_sm90", "penstock_recurrent_fwd"}
    assert {name for far, name, *_ in found if far == str(2**26)} == near, done.stderr
    for far, name, *wide in found:
        strides = {"penstock_chunk_states": [["g_t"], ["x_t", "g_t"]], "penstock_recurrent_fwd": [["q_t", "g_t"]]}.get(name, [["g_t"]])
        assert wide in ([[]] if far == str(2**16) else strides), (far, name)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_record_has_every_launch_and_no_other(arch):
    assert [name for one in configurations(arch) for name, _ in launches(one, TARGETS[arch])] == list(RECORD.launches[arch])
    assert {one.variant for one in ahead.CONFIGURATIONS} == set(VARIANTS)


def test_small_gpus_have_every_kernel():
    assert {one.name for one in configurations("sm_86") if not isinstance(one, ChainCall)} == {
        *ahead.IN_PART, *delta_ahead.IN_PART, *(one.name for one in softmax_ahead.IN_PART)
    }  # fmt: skip
    small, large = ({job.kernel for one in configurations(arch) for _, job in launches(one, TARGETS[arch])} for arch in ("sm_86", "sm_80"))
    assert small == large


@pytest.mark.parametrize("one", chain_calls(), ids=lambda one: f"{one.chain}-{one.form}-{one.dtype}")
def test_every_form_of_a_chain_is_compiled(one):
    """With sizes of real models, no form refuses its examples on the GPU for which all of them have code."""
    launched = [name.rpartition(": ")[2].partition(" ")[0] for name, _ in launches(one, TARGETS["sm_90"])]
    if OLDER and not launched:
        pytest.skip("the form is in Gluon, which this Triton does not compile")
    assert launched
    with launches_for(TARGETS["sm_90"]):
        for example in one.examples:
            draw = Draw(example.dtype, torch.device("cpu"), gradients=example.gradients, real=True)
            with torch.set_grad_enabled(example.gradients), example.within():
                call = example.draw(draw)
                assert CHAINS[one.chain].form(one.form).refuses(call) is None
                assert set(CHAINS[one.chain].form(one.form).kernels(call)) <= set(launched)


def test_nothing_is_launched_while_launches_are_collected(kernels_on_a_cpu):
    """Afterwards, kernels run again, and the CPU is no GPU."""
    c = Draw(torch.float32, torch.device("cpu"), gradients=False)("x", 3, 5)
    before = pointwise(c, "tanh")
    with launches_for(TARGETS["sm_80"]) as found:
        pointwise(c, "tanh")
        assert Target.of(c.device) == TARGETS["sm_80"]
    assert [one.kernel.fn.__name__ for one in found] == ["penstock_pointwise_fwd"]
    assert Target.of(c.device).interpreted
    torch.testing.assert_close(pointwise(c, "tanh"), before)
    assert len(found) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120", "gfx942"])
def test_chunk_kernels_of_heads_up_to_128_hardly_spill(arch):
    for name, found in RECORD.launches[arch].items():
        variant, sizes = name.split()[:2]
        if variant != "softmax_attention" and ": penstock_chunk" in name and max(map(int, sizes.rstrip(":").split(",")[3:])) <= 128:
            assert found.spill <= 128, (name, found)


@pytest.mark.parametrize("arch", ARCHS)
def test_recorded_shared_memory_is_within_the_estimate(arch, monkeypatch):
    """``shared_bytes`` decides whether block sizes fit a GPU for which no measurements exist."""
    estimates = []

    def noted(key, target):
        found = table.config(key, target)
        estimates.append((key.kernel, table.shared_bytes(found, key)))
        return found

    monkeypatch.setattr(calls, "config", noted)
    kernels = {"penstock_chunk_fwd": "forward", "penstock_chunk_bwd": "backward", "penstock_chunk_states": "states",
               "penstock_segment_sums": "states", "penstock_segment_sums_sm90": None, "penstock_chunk_states_sm90": None,
               "penstock_recurrent_fwd": "recurrent", "penstock_recurrent_bwd": "recurrent",
               "penstock_segment_scan": None, "penstock_channel_fwd_sm90": None,
               "penstock_channel_bwd_sm90": None, "penstock_channel_bwd_float32_sm90": None,
               "penstock_sum_blocks": None, "penstock_chunk_dv": None,
               "penstock_channel_weights_sm90": None, "penstock_channel_walk_sm90": None, "penstock_scalar_fwd_sm90": None,
               "penstock_scalar_bwd_sm90": None, "penstock_chunk_bwd_groups": None}  # fmt: skip
    for one in configurations(arch):
        if not isinstance(one, ahead.Configuration):
            continue
        for which in one.passes:
            estimates.clear()
            for name, _ in launches(replace(one, passes=(which,)), TARGETS[arch]):
                taken = RECORD.launches[arch][name].shared
                assert taken <= TARGETS[arch].shared_memory, name
                kernel = "step" if which == "step" else kernels[name.rpartition(": ")[2].partition(" ")[0]]
                if name.endswith("penstock_chunk_bwd_groups"):
                    assert taken <= groups.shared_bytes(one.shape.K), name
                if kernel is not None:
                    assert taken <= max(size for asked, size in estimates if asked == kernel), name


@pytest.mark.parametrize("arch", ARCHS)
def test_recorded_shared_memory_of_softmax_attention_is_within_the_estimate(arch, monkeypatch):
    estimates, found = [], softmax.config

    def noted(kernel, D, size, target):
        estimates.append((kernel, softmax.shared_bytes(kernel, found(kernel, D, size, target), D, size)))
        return found(kernel, D, size, target)

    monkeypatch.setattr(softmax, "config", noted)
    for one in configurations(arch):
        if isinstance(one, softmax_ahead.Configuration):
            estimates.clear()
            every = [name for name, _ in launches(one, TARGETS[arch]) if not name.endswith("penstock_attention_delta")]
            assert all(RECORD.launches[arch][name].shared <= TARGETS[arch].shared_memory for name in every)
            names = [name for name in every if not name.endswith("_sm90")]
            assert [name.rpartition(": ")[2] for name in names] == [softmax.KERNELS[kernel].fn.__name__ for kernel, _ in estimates]
            for name, (_, size) in zip(names, estimates):
                assert RECORD.launches[arch][name].shared <= size <= TARGETS[arch].shared_memory, name


def test_findings_say_what_is_wrong():
    name = next(iter(RECORD.launches["sm_80"]))
    right = RECORD.launches["sm_80"][name]
    limit = TARGETS["sm_80"].shared_memory

    def fault(found, triton=RECORD.triton, record=RECORD, name=name):
        return resources.compared(record, triton, {("sm_80", name): found})[0].wrong

    more = right._replace(spill=right.spill + 4)
    assert fault(right) is None
    assert fault(right._replace(registers=255, spill=0)) is None
    assert fault(more) == f"spills {more.spill} bytes, the record has {right.spill}"
    assert fault(more, triton="3.0") is None
    assert fault(more, record=None) is None
    for triton in (RECORD.triton, "3.0"):
        assert fault(right._replace(shared=limit), triton) is None
        assert fault(right._replace(shared=limit + 1), triton).startswith(f"{limit + 1} bytes of shared memory")
        assert fault(Failure("no such instruction"), triton) == "does not compile: no such instruction"
    assert "not in the record" in fault(right, name="another")
    large = replace(RECORD, launches={"sm_80": {name: right._replace(spill=132)}}, waivers={})
    waived = replace(large, waivers={"it is old": {"sm_80": [name]}})
    assert fault(right._replace(spill=132), record=waived) is None
    assert fault(right._replace(spill=132), record=large) == "spills 132 bytes: more than 128 need a waiver in resources.json"
    assert fault(right._replace(spill=128), record=large) is None
    assert fault(right, name="another", triton="3.0") is None


def test_a_record_is_read_as_written(tmp_path):
    found = {("sm_80", "a: b"): Resources(1, 2, 3), ("gfx942", "a: b"): Resources(4, 5, 6), ("gfx942", "c"): Failure("no")}
    record = resources.RecordedResources.of("3.7.1", resources.compared(None, "3.7.1", found))
    record.waivers["a reason"] = {"sm_80": ["a: b"]}
    record.write(tmp_path / "deep" / "record.json")
    assert resources.RecordedResources.read(tmp_path / "deep" / "record.json") == record
    assert record.launches == {"sm_80": {"a: b": Resources(1, 2, 3)}, "gfx942": {"a: b": Resources(4, 5, 6)}}


@pytest.mark.parametrize("arch", TARGETS)
def test_waivers_are_of_launches_that_need_them(arch):
    found = RECORD.launches[arch]
    assert RECORD.waived(arch) == {name for name, one in found.items() if one.spill > resources.MOST_SPILLED}


def test_a_new_record_keeps_the_waivers_that_it_needs():
    waivers = {"a": {"sm_80": ["x", "y"], "sm_90": ["x"]}, "b": {"sm_80": ["z"]}}
    found = {("sm_80", "x"): Resources(1, 200, 3), ("sm_80", "y"): Resources(1, 100, 3)}
    record = resources.RecordedResources.of("3.7.1", resources.compared(None, "3.7.1", found), waivers)
    assert record.waivers == {"a": {"sm_80": ["x"]}}


SIZES = [(K, V) for K in (16, 64, 128, 256) for V in (16, 64, 512)]


@pytest.mark.parametrize("precision", table.PRECISIONS)
@pytest.mark.parametrize("kernel", table.KERNELS)
def test_sizes_by_rule_fit_a_small_gpu(kernel, precision):
    small = Target("sm_77", 8, 100 << 10)
    for name in table.DECAYS:
        for K, V in SIZES:
            key = Key(kernel, name, "updated", precision, K, V)
            found = table.config(key, small)
            least = found.stages == 1 and found.C in (0, 16)  # the smallest configuration
            assert table.shared_bytes(found, key) <= small.shared_memory or least, (key, found)


@pytest.mark.parametrize(
    ("variant", "sizes", "widths"),
    [
        ("gla", (32, 64, 64), {1: (16, 1), 8: (16, 1), 9: (32, 1), 16: (32, 1), 17: (64, 2), 1024: (64, 2)}),
        ("gla", (32, 64, 20), {1: (16, 1), 17: (32, 2)}),
        ("gla", (4, 256, 512), {1: (16, 2), 9: (32, 4), 17: (64, 8)}),
        ("retention", (8, 512, 512), {1: (16, 4), 8: (32, 8)}),
    ],
)
def test_decode_steps_have_wide_rows_if_programs_fill_the_gpu(variant, sizes, widths):
    """BV and warps by sequences: 4 programs for each of 132 multiprocessors; 64 float32 of the state a thread at most."""
    for N, wanted in widths.items():
        launch = planned("step", without_memory(variant, Shape(N, 1, *sizes), torch.bfloat16), TARGETS["sm_90"]).plan.launches[0]
        constants = dict(zip(launch.kernel.arg_names[-len(launch.constants) :], launch.constants))
        assert (constants["BV"], dict(launch.options)["num_warps"]) == wanted, N
        assert launch.grid == N * sizes[0] * -(-sizes[2] // constants["BV"])
        assert constants["BK"] * constants["BV"] <= 64 * 32 * dict(launch.options)["num_warps"]


def test_narrow_steps_of_a_table_are_kept():
    inputs = without_memory("gla", Shape(1, 1, 1, 64, 64), torch.bfloat16)
    call = Call.of(inputs.problem(), TARGETS["sm_90"])
    narrow = KernelConfig(4, BV=8, programs_per_sm=64)
    assert Call.of(call.p, call.target._replace(table={call.key("step"): narrow})).step_config() == narrow


def test_fitting_takes_fewer_stages_then_shorter_chunks():
    key = Key("forward", "channel", "updated", "bf16", 64, 64)
    wanted = KernelConfig(4, C=64, stages=3)
    sizes = [wanted, wanted._replace(stages=2), wanted._replace(stages=1), KernelConfig(4, C=32), KernelConfig(4, C=16)]
    for one in sizes:
        assert table.fitted(wanted, key, table.shared_bytes(one, key)) == one
    assert table.fitted(wanted, key, 1) == sizes[-1]


def test_nothing_compiles_under_the_interpreter():
    done = CliRunner().invoke(main, ["check", "--compile"])
    assert done.exit_code == 2
    assert "TRITON_INTERPRET must be unset" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_90"], "arch must be left out without --compile"),
        (["--record", "a.json"], "record must be left out without --compile, got 'a.json'. Add --compile."),
        (["--only", "gla"], "only must be left out without --compile"),
        (["--compile", "--arch", "sm_1"], "arch must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, gfx942, got 'sm_1'"),
        (["--compile", "--only", "mamba"], "only must be a part of a launch's name"),
    ],
)
def test_wrong_options_of_check_give_one_message(words, message, monkeypatch):
    monkeypatch.setattr("penstock.tune.ahead.interpreting", lambda: False)
    done = CliRunner().invoke(main, ["check", *words])
    assert done.exit_code == 2, done.output
    assert message in done.output


SLOTS = """
import torch
from penstock.recurrence.triton import in_place
from penstock.gpu.plan import Planned
from penstock.tune.ahead import jobs, resources
from penstock.tune.passes import without_memory
from penstock.gpu.targets import TARGETS
from penstock.tokens.shape import Shape

for variant, tokens in (("rwkv6", 1), ("simple_gla", 1), ("gla", 100)):
    x = without_memory(variant, Shape(4, tokens, 2, 64, 64), torch.bfloat16)
    pool, slots = torch.empty(9, 2, 64, 64, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    problem = x.in_place(pool, slots)
    made = in_place.advance_plan(problem, TARGETS["sm_90"]).at(problem.sizes)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "u": x.u, "state": pool, "slots": slots, "cu_seqlens": None}
    tensors = {name: x.q if tensor is None else tensor for name, tensor in tensors.items()}
    for job in jobs(Planned(made, tensors), "sm_90"):
        print(job.kernel, resources(job).spill)
"""


def test_updates_in_place_by_slots_compile():
    done = penstock("-c", SLOTS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 4, "one launch for decode steps, two for longer rows"


def test_more_tensor_memory_than_a_program_has_is_a_failure(monkeypatch):
    """Triton compiles such a kernel to a trap, with few registers and no spills."""
    metadata = type("Metadata", (), {"shared": 0, "tmem_size": 640})
    monkeypatch.setattr(compile_ahead, "_compile", lambda job: type("Kernel", (), {"metadata": metadata, "asm": {}}))
    with pytest.raises(RuntimeError, match="640 columns of tensor memory, a program has 512"):
        compile_ahead.resources(None)


@pytest.mark.parametrize("arch", [arch for arch in RECORD.launches if arch.startswith("sm_")])
def test_no_recorded_kernel_is_a_trap(arch):
    assert [name for name, one in RECORD.launches[arch].items() if one.registers <= 4] == []
