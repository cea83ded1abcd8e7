"""The kernels of layers and of the sampler compile for sm_90 as Triton compiles them at a launch: an integer of 1 becomes a constant."""

import os
import subprocess
import sys

import pytest
from sampling import slow

pytest.importorskip("triton")

COMPILE = """
import sys
from functools import partial
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from penstock.engine import choosing_kernel, known_kernel, scoring_kernel
from penstock.engine.slot_tables import BIASED, CONSTRAINED, LIMITED, PENALISED, SlotTables
from penstock.layers.token_shift import kept_formula, shift_formula
from penstock.layers.triton import convolution_launch, cross_entropy, few_rows_launch, launch, mamba2_launch, norm_gate_launch
from penstock.layers.triton import rwkv7_launch, rwkv7_step_launch, token_shift_launch
from penstock.layers.triton import rows as states
from penstock.layers.triton import product as products

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64", torch.float64: "*fp64"}
compiled = set()


def compile_only(kernel, *args, grid, warmup, num_warps=4, num_stages=3, launch_pdl=False, enable_fp_fusion=True, **constants):
    for one, x in zip(kernel.params, args):
        if isinstance(x, int) and x == 1 and not one.do_not_specialize:
            constants[one.name] = 1
    given = dict(zip(kernel.arg_names, args))
    signature = {
        name: "constexpr" if name in constants
        else NAMES[given[name].dtype] if isinstance(given[name], torch.Tensor)
        else "fp32" if isinstance(given[name], float) else "i32"
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): x for name, x in constants.items()}
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl, "enable_fp_fusion": enable_fp_fusion}
    triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options=options)
    compiled.add(kernel.__name__)


JITFunction.run = compile_only


for module in (launch, convolution_launch, mamba2_launch, norm_gate_launch, rwkv7_launch, rwkv7_step_launch):
    module.early = lambda device: {"launch_pdl": True}


def learned(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


def backward(*results):
    torch.autograd.backward([y for y in results if y is not None], [torch.zeros_like(y) for y in results if y is not None])


step = int(sys.argv[1])
for tokens, heads in [*product((1, 3), (1, 2))][:: 3 if step > 1 else 1]:
    starts = torch.zeros(tokens, dtype=torch.int64)
    for hidden, up in ((None, None), (learned(tokens, 2, 8), learned(2, 8, 70))):
        last = torch.zeros(1, 70, dtype=torch.bfloat16)
        shift = token_shift_launch.TokenShift.apply
        backward(*shift(learned(tokens, 70), last, starts, hidden, up, shift_formula, False, False, learned(70), learned(70)))
        for slots in (None, torch.zeros(1, dtype=torch.int64)):
            factors = learned(2, 70).detach().unbind()
            given = (torch.zeros(tokens, 70), torch.zeros(1, 70), starts, slots, factors, hidden, up)
            token_shift_launch.shifted(*given, tanh=hidden is not None)
    for weight in (None, learned(64), learned(heads, 64)):
        bias = None if weight is None else learned(*weight.shape)
        x, share = learned(tokens, heads, 64), torch.zeros(tokens, heads, requires_grad=True)
        for then, activation, more in ((None, "silu", (None, None)), (learned(5, 64 * heads), "identity", (share, x))):
            kind = norm_gate_launch.Norm(1e-5, True, activation)
            backward(norm_gate_launch.NormGate.apply(x, x, weight, bias, *more, then, kind, None))
    for mixed in (False, True):
        x, H = learned(tokens, heads, 64), learned(heads, 64)
        given = (*[x] * 4, *[H] * 5, *([x, x, x, H] if mixed else [None] * 4))
        backward(*rwkv7_launch.Inputs.apply(None, *(one if one is None or one is H else one.flatten(1) for one in given)))
    for b in (None, learned(tokens, 70)):
        backward(launch.Activated.apply(learned(tokens, 70), b, "silu", None))
    backward(launch.ReluSquared.apply(learned(tokens, 70)))
    backward(*shift(learned(tokens, 70), last, starts, None, None, kept_formula, True, False, learned(70)))
    backward(*shift(learned(tokens, 70), last, starts, None, None, shift_formula, False, True, learned(70)))
    for activation in ("sigmoid", "tanh", "elu+1"):
        launch.pointwise_backward(launch.pointwise(learned(tokens, 70), activation), learned(tokens, 70), activation)
    backward(launch.Decay.apply(learned(tokens, 70), learned(70), None))
    backward(launch.LogSigmoid.apply(learned(tokens, 70), 16.0, None))
    for channels, more in product((1, 64), (0, 7)):
        H, inner = learned(heads), heads * channels
        x = learned(tokens, inner + more)[:, :inner].unflatten(1, (heads, channels))
        backward(*mamba2_launch.TimeSteps.apply(learned(tokens, heads + more)[:, :heads], H, H, x, 0.0, float("inf"), None)[:2])
        for then in (None, learned(5, inner)):
            z = learned(tokens, inner + more)[:, :inner]
            given = learned(tokens, heads, channels), x, H, z, learned(inner), then
            backward(mamba2_launch.GatedNorm.apply(*given, heads, 1e-5, None))
    for rank in (1, 8):
        few_rows_launch.low_rank_decay(torch.zeros(tokens, rank), torch.zeros(rank, 70), torch.zeros(70), early=True)
    for channels in (1, 70):
        x, weight = torch.zeros(tokens, channels), torch.zeros(channels)
        for y, bias in ((None, None), (x, weight)):
            launch.add_norm(x, y, weight, bias, 1e-5, bias is not None, x.dtype)
            given = [None if one is None else learned(*one.shape) for one in (x, y, weight, bias)]
            total, normed = launch.AddNorm.apply(*given, 1e-5, bias is not None, x.dtype, None)
            backward(*((total, normed) if y is None else (normed,)))
        for weight in (torch.zeros(5, channels), torch.zeros(channels, 5).T):
            products.multiply(torch.zeros(tokens, channels), weight)
            products.multiply(torch.zeros(tokens, channels), weight, 4, relu_squared=True, gate=torch.zeros(tokens, 5))
        products.multiply_few(torch.zeros(tokens, channels), torch.zeros(5, channels))
        for ends in (None, torch.zeros(tokens + 1, dtype=torch.int64)):
            states.write_rows(torch.zeros(tokens, channels), torch.zeros(1, channels), torch.zeros(tokens, dtype=torch.int64), ends)

zeros = partial(torch.zeros, dtype=torch.bfloat16)
for tokens, channels, width, bias in [*product((1, 3), (1, 70), (1, 4), (None, 1))][::step]:
    bias, starts, bounds = bias and learned(channels), torch.zeros(tokens, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    given = (learned(tokens, channels), zeros(1, width - 1, channels), starts, bounds, learned(channels, width), bias, bias is None, None)
    backward(convolution_launch.Convolution.apply(*given)[0])
    for slots in (None, torch.zeros(tokens, dtype=torch.int64)):
        x, pool, weight = zeros(tokens, channels), zeros(1, width - 1, channels), zeros(channels, width)
        convolution_launch.convolved(x, pool, starts, slots, weight, bias, silu=True)
        convolution_launch.tails(x, pool, bounds, slots, in_place=True)
        convolution_launch.step(x, pool, slots, weight, bias, silu=True)
for rows, size in ((1, 512), (9, 70)):
    x, weight, row = zeros(rows, size), zeros(48, size), zeros(size)
    few_rows_launch.products([x], [weight], zeros(rows, 48))
    few_rows_launch.products([x] * 2, [zeros(size, 24).T, weight], relu_squared=True)
    few_rows_launch.products([zeros(70, size)] * 2, [zeros(size, 24).T, weight])
    for parts in (1, 5):
        few_rows_launch.products([x] * parts, [weight] * parts)
        few_rows_launch.low_rank(zeros(rows, parts, 32), zeros(parts, 32, size), [row] * parts, x, x, early=True)
        for y, bias, slots in ((None, None, None), (x, row, torch.zeros(rows, dtype=torch.int64))):
            options = {"centre": y is None, "complement": y is None, "kept": y is None, "early": True}
            few_rows_launch.shifted_norm(x, y, row, bias, 1e-5, x, slots, [row] * parts, **options)
            spans = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int64)
            few_rows_launch.shifted_norm(x, y, row, bias, 1e-5, x, slots, [row] * parts, spans, **options)
    few_rows_launch.low_rank_decay(zeros(rows, 64), zeros(64, size), row, early=True)
    for heads, channels, slots in ((1, 64, None), (3, 10, torch.zeros(rows, dtype=torch.int64))):
        tokens, head, norm = zeros(rows, heads, channels), zeros(heads, channels), zeros(heads * channels)
        pool = torch.zeros(rows, heads, channels, channels)
        for low, up in ((None, None), (zeros(rows, 5), zeros(5, heads * channels))):
            few_rows_launch.rwkv_step(*[tokens] * 4, head, head, low, up, pool, slots, norm, norm, 1e-5)
        for mixed in (True, False):
            given = rwkv7_launch.Given(*[tokens] * 4, *[head] * 5, *([*[tokens] * 3, head] if mixed else [None] * 4))
            rwkv7_step_launch.rwkv7_step(given, tokens, tokens, norm, norm, 1e-5, pool, slots)
    for ranks in ((5, 8), (8, 8, 32, 64)):
        downs, ups = ([zeros(*shape) for shape in shapes] for shapes in ([(size, M) for M in ranks], [(M, size) for M in ranks]))
        rwkv7_step_launch.low_rank_maps([x] * len(ranks), downs, ups, ["tanh", *[None] * (len(ranks) - 1)])
for x in (zeros(2, 10000), zeros(2, 10000).double()):
    tables, places = SlotTables(2, 10000, x.device), torch.zeros(1000, dtype=torch.int64)
    tables.seen = torch.zeros(2, 10000, dtype=torch.int32)
    for needs in (0, LIMITED, LIMITED | BIASED, PENALISED, BIASED | CONSTRAINED, LIMITED | PENALISED | CONSTRAINED):
        choosing_kernel.choose_by_kernel(tables, x, places, 2, needs, places)
    for most in (0, 1, 5):
        scoring_kernel.logprobs_by_kernel(x, places[:2], most)
known_kernel.known_tokens(places, places, places)
for upstream in (None, torch.zeros(2)):
    cross_entropy.cross_entropy(zeros(2, 5000), torch.zeros(2, dtype=torch.int64), upstream, torch.zeros(2))
print(*sorted(compiled), sep="\\n")
"""


def printed(script, *arguments):
    """The lines that a script prints in a process without Triton's interpreter."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(900)  # 80 s alone
@pytest.mark.parametrize("step", [5, *slow(1)])
def test_every_fused_kernel_compiles_for_any_number_of_tokens(step):
    names = ["decay", "gated", "gated_norm", "log_sigmoid", "norm_gate", "pointwise", "relu_squared", "rwkv7_inputs", "shift", "time_steps"]
    both = {f"{name}_{way}" for name in names for way in ("bwd", "fwd")}
    both |= {f"shift_{name}_bwd" for name in ("hidden", "low_rank", "weights")}
    both |= {f"convolution_{name}" for name in ("bwd", "fwd", "step", "tails")}
    decoding = {"low_rank", "low_rank_products", "rwkv7_step", "product_of_few_rows", "products", "rwkv_step", "shifted_norm", "write_rows"}
    others = {"add_norm", "add_norm_bwd", "choose", "cross_entropy", "known_tokens", "product", "score", "sum_of_parts", *decoding}
    assert set(printed(COMPILE, str(step))) == {f"penstock_{name}" for name in both | others}


FORMS = """
import sys

import torch

from penstock.gpu.hopper import Tile
from penstock.layers.triton import hopper_products_launch as launch
from penstock.tune.ahead import Job, Memory, kernel_name, resources

kernel = launch.hopper_products.penstock_products_hopper
for sizes in ((64, 2048, 2048, 2048, 2048), (7168, 2048), (2048,), (160,), (96, 96, 256, 64, 2048, 2048, 2048)):
    weights = [torch.empty(N, 2048, dtype=torch.bfloat16) for N in sizes]
    if len(sizes) >= 5:
        weights = [x if len(x) == 2048 else torch.empty(2048, len(x), dtype=torch.bfloat16).T for x in weights]
    for rows in (8, 16, 32, 64, 128, 192, 256, 384, 512)[:: int(sys.argv[1])]:
        form = launch.form_of(rows, weights, 132)
        if form is None:
            continue
        inputs, results = ([torch.empty(rows, N, dtype=torch.bfloat16) for N in some] for some in ([2048] * len(sizes), sizes))
        gate = results[0] if len(sizes) == 1 else None
        counts = torch.zeros(256, dtype=torch.int32)
        given = launch.arguments(inputs, weights, results, gate, form, relu_squared=gate is None, early=True, counts=counts)
        arguments = [Memory(x.dtype, x.numel(), Tile(*known["block_shape"])) for x, known in given.tiles]
        arguments += [Memory(x.dtype, x.numel()) if isinstance(x, torch.Tensor) else x for x in given.others]
        arguments += [given.constants[name] for name in kernel.arg_names[len(arguments) :]]
        found = resources(Job("sm_90", kernel_name(kernel), tuple(arguments), (("num_warps", form.warps), ("launch_pdl", True))))
        print(found.spill, found.shared, found.registers, sizes, rows, form)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [4, *slow(1)])
def test_linear_maps_for_hopper_compile_without_spills(step):
    """With as much shared memory as sm_90 has."""
    lines = printed(FORMS, str(step))
    assert len(lines) >= 32 // step
    for line in lines:
        spill, shared = map(int, line.split()[:2])
        assert spill == 0, line
        assert shared <= 227 * 1024, line


ONE_ROW = """
import sys
from itertools import product

import torch

from penstock.gpu.hopper import Tile
from penstock.layers.triton import few_rows_launch
from penstock.layers.triton import hopper_one_row_launch as launch
from penstock.tune.ahead import Job, Memory, kernel_name, resources


def compiled(kernel, given, others, **options):
    arguments = [Memory(x.dtype, x.numel(), Tile(*known["block_shape"])) for x, known in given.tiles]
    arguments += [Memory(x.dtype, x.numel()) if isinstance(x, torch.Tensor) else x for x in others]
    arguments += [given.constants[name] for name in kernel.arg_names[len(arguments) :]]
    found = resources(Job("sm_90", kernel_name(kernel), tuple(arguments), (*options.items(), ("launch_pdl", True))))
    print(found.spill, found.shared, found.registers, kernel_name(kernel), given.constants)


for dtype, slots in ((torch.bfloat16, torch.int64), (torch.float16, torch.int32))[:: int(sys.argv[1])]:
    empty = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype)
    slots = empty(1, dtype=slots)

    def shift(C, parts, centre):
        row, pool = empty(1, C), empty(132, C)
        return launch.Shift(row, row, row[0], row[0] if centre else None, 1e-5, centre, pool, slots, [row[0]] * parts)

    for (C, M), centre in product(((2048, 32), (1024, 64), (768, 32), (24, 5)), (False, True)):
        results, weights = (empty(1, C), empty(1, C), empty(5, 1, C)), (empty(C), empty(C, 5 * M), empty(5, M, C))
        given = launch.low_rank_arguments(shift(C, 5, centre), *weights, results, early=True)
        options = {"num_warps": launch.WARPS, "maxnreg": launch.REGISTERS}
        compiled(launch.kernels.penstock_shifted_low_rank, given, given.given, **options)
    for (K, F), centre in product(((2048, 7168), (2560, 8960), (512, 6400)), (False, True)):
        weights, results = [empty(F, K), empty(K, K)], [empty(1, K), empty(1, K), empty(1, F), empty(1, K)]
        given = launch.channel_arguments(shift(K, 2, centre), weights, results, early=True)
        compiled(launch.kernels.penstock_shifted_products, given, given.given, num_warps=4)
    weights = [empty(2048, 64).T, *[empty(2048, 2048)] * 4]
    for rows in (1, 8):
        inputs, results = [empty(rows, 2048)] * 5, [empty(rows, 64), *[empty(rows, 2048)] * 4]
        given = launch.maps.arguments(inputs, weights, results, None, launch.maps.HALVES, relu_squared=False, early=True)
        compiled(launch.maps.hopper_products.penstock_products_hopper, given, given.others, num_warps=4)
    hidden, weights, row = empty(1, 7168), [empty(2048, 7168)], empty(1, 2048)
    options = {"relu_squared": False, "early": True, "lasts": few_rows_launch.Lasts(row, empty(9, 2048), slots)}
    given = launch.maps.arguments([hidden], weights, [row], row, launch.maps.form_of(1, weights, 132), **options)
    compiled(launch.maps.hopper_products.penstock_products_hopper, given, given.others, num_warps=4)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [2, *slow(1)])
def test_steps_of_one_token_for_hopper_compile_without_spills(step):
    """Two programs of the linear maps share a multiprocessor, and those of low-rank maps run beside them."""
    lines = printed(ONE_ROW, str(step))
    assert len(lines) == 34 // step
    for line in lines:
        spill, shared, registers = map(int, line.split()[:3])
        assert spill == 0, line
        assert shared <= 113 * 1024, line
        assert registers <= 255, line


CONVOLUTIONS = """
import sys
from itertools import product

import torch

from penstock.layers.triton import convolution
from penstock.layers.triton.convolution_launch import CHANNELS, GROUP
from penstock.tune.ahead import Job, Memory, kernel_name, resources

R, C, wide, programs, tokens = 16384, 4352, 8512, 103, 160
for arch, dtype, W in [*product(("sm_80", "sm_90", "gfx942"), (torch.bfloat16, torch.float32), (4, 8))][:: int(sys.argv[1])]:
    x, y, pool = (Memory(dtype, R * C) for _ in range(3))
    starts, bounds, slots = Memory(torch.int32, R), Memory(torch.int64, 9), Memory(torch.int64, 8)
    weight, bias, sums = Memory(dtype, C * W), Memory(dtype, C), Memory(torch.float32, programs * (W + 1) * C)
    strides, pdl = (wide, (W - 1) * C, C), arch == "sm_90"
    constants = {"W": W, "BIAS": True, "SILU": True, "SLOTS": True, "BC": CHANNELS, "GROUP": GROUP, "PDL": pdl}
    calls = {
        convolution.penstock_convolution_fwd: (x, pool, starts, slots, weight, bias, y, R, C, *strides, tokens),
        convolution.penstock_convolution_bwd: (x, pool, starts, weight, bias, y, y, sums, R, C, *strides, C, tokens),
        convolution.penstock_convolution_tails: (x, bounds, slots, pool, pool, C, *strides, *strides[1:]),
        convolution.penstock_convolution_step: (x, pool, slots, weight, bias, y, C, *strides),
    }
    for kernel, given in calls.items():
        arguments = [*given, *(constants[name] for name in kernel.arg_names[len(given) :])]
        options = (("num_warps", 1), ("launch_pdl", True)) if pdl else (("num_warps", 1),)
        found = resources(Job(arch, kernel_name(kernel), tuple(arguments), options))
        print(found.spill, found.shared, found.registers, arch, dtype, W, kernel.__name__)
"""
MAMBA2 = """
import sys
from itertools import product

import torch

from penstock.call import private
from penstock.layers.triton import mamba2_launch
from penstock.tune.ahead import Job, Memory, kernel_name, resources

step, *archs = sys.argv[1:]
launches = []


class Noted:
    \"\"\"Notes launches of a kernel in place of running them.\"\"\"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments, **options: launches.append((self.kernel, arguments, options))


mamba2_launch.on_device_of = lambda x, kernel: Noted(kernel)
mamba2_launch.early = lambda device: {"launch_pdl": True} if arch == "sm_90" else {}
mamba2_launch.limit = lambda x, registers: {"maxnreg": registers} if arch.startswith("sm_") else {}
torch.set_default_device("meta")
private.fast = lambda tensors: True  # as for tensors of a GPU
groups = ((24, 1), (32, 1), (48, 1), (64, 1), (80, 1), (96, 1), (100, 1), (128, 1), (128, 8))
calls = list(product((torch.bfloat16, torch.float16, torch.float32), groups))[:: int(step)]
for arch, (dtype, (H, G)) in product(archs, calls):
    R, inner, state = 16384, 64 * H, 2 * 128 * G
    whole, mixed = torch.empty(R, 2 * inner + state + H, dtype=dtype), torch.empty(R, inner + state, dtype=dtype)
    z, dt, x = (one.requires_grad_() for one in (whole[:, :inner], whole[:, -H:], mixed[:, :inner].unflatten(1, (H, 64))))
    heads, weight, then = (torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in ((H,), (inner,), (inner // 2, inner)))
    g, v, x = mamba2_launch.TimeSteps.apply(dt, heads, heads, x, 0.0, float("inf"), None)
    y = mamba2_launch.GatedNorm.apply(v, x, heads, z, weight, then, G, 1e-5, None)
    torch.autograd.backward([y, g], [torch.empty_like(y), torch.empty_like(g)])
    for kernel, arguments, options in launches:
        given = [Memory(one.dtype, one.numel()) if isinstance(one, torch.Tensor) else one for one in arguments]
        given += [options.pop(name) for name in kernel.arg_names[len(given) :]]
        found = resources(Job(arch, kernel_name(kernel), tuple(given), tuple(options.items())))
        print(found.spill, found.registers, kernel.__name__, dtype, H, G, arch)
    launches.clear()
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [5, *slow(1)])
def test_short_convolutions_compile_without_spills(step):
    lines = printed(CONVOLUTIONS, str(step))
    assert len(lines) == 4 * len(range(0, 12, step))
    for line in lines:
        assert line.startswith("0 0 "), line


ARCHS = ("sm_80", "sm_90", "gfx942")


@pytest.mark.parametrize(
    ("step", "archs"), [(13, ARCHS), *(pytest.param(1, (arch,), marks=pytest.mark.slow) for arch in ARCHS)], ids=["sample", *ARCHS]
)
def test_chains_of_mamba2_compile_without_spills(step, archs):
    """At the widths of published models, and others up to 8192 channels; of all calls every 13th."""
    lines = printed(MAMBA2, str(step), *archs)
    assert len(lines) == len(range(0, 3 * 9, step)) * 4 * len(archs)
    assert all(line.startswith("0 ") for line in lines), [line for line in lines if not line.startswith("0 ")]
