"""On a GPU: large and odd shapes, every dtype, extreme decays, and what a call may not do. Run with ``pytest -m gpu``."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from penstock.problem import Problem
from penstock.recurrence.contract import Gradients, gradients_of

import penstock as ps
from penstock.recurrence import chunkwise
from penstock.recurrence.operators import FAMILY
from penstock.recurrence.variants import VARIANTS
from penstock.verify import rounding
from penstock.verify.inputs import Inputs, Shape, inputs
from penstock.verify.oracle import budget, error, growth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
GATED = [name for name, row in VARIANTS.items() if row.decay]
CHANNELS = [name for name, row in VARIANTS.items() if row.decay == "BTHK"]
SMALL = Shape(2, 300, 2, 64, 64)


def strong(x: Inputs, which: str) -> Inputs:
    """The same inputs with some decays as strong as they get."""
    random = torch.Generator(x.q.device).manual_seed(5)
    chance = torch.rand(x.g.shape, generator=random, device=x.g.device)
    g = {
        "mixture": torch.where(chance < 0.1, -1000.0, torch.where(chance < 0.2, -torch.inf, -1e-4)),
        "gone": torch.full_like(x.g, -1000.0),
        "few": torch.where(chance < 0.001, -300.0, x.g),
        "zero": torch.zeros_like(x.g),
    }[which]
    return replace(x, g=g.to(x.g.dtype))


def results(x: Inputs, impl: str, packed: torch.Tensor | None = None, reverse: bool = False) -> dict[str, torch.Tensor]:
    """Output, final state and all gradients, through the public operator; from a random state and with a gradient on the final one."""
    N = x.shape.B if packed is None else len(packed) - 1
    state, d_output, d_state = companions(x, N)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.u)]
    state.requires_grad_()
    found = _run(x.variant, *leaves, None, state, True, packed, reverse, impl)
    asked = [t for t in (*leaves, state) if t is not None]
    grads = iter(torch.autograd.grad(found, asked, (d_output, d_state)))
    names = [name for name, t in zip(Gradients._fields, (*leaves, state)) if t is not None]
    return {"output": found.output.detach(), "final state": found.final_state.detach()} | dict(zip(names, grads))


def companions(x: Inputs, N: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator(x.q.device).manual_seed(7)
    _, _, H, K, V = x.shape
    shapes = ((N, H, K, V), x.v.shape, (N, H, K, V))
    state, d_output, d_state = (torch.randn(s, generator=random, device=x.q.device) for s in shapes)
    return state, d_output.to(x.v.dtype), d_state


def exact(x: Inputs, formula, packed=None, reverse=False) -> dict[str, torch.Tensor]:
    """The same in float64 by a formula of plain PyTorch; of a constant decay's gradient the terms, one a token."""
    state, d_output, d_state = companions(x, x.shape.B if packed is None else len(packed) - 1)
    q, k, v, g, u = (None if t is None else t.double() for t in (x.q, x.k, x.v, x.g, x.u))
    variant = x.variant
    if VARIANTS[variant].decay in ("H", "HK"):
        g, variant = g.expand(*x.shape[:2], *g.shape), {"H": "simple_gla", "HK": "rwkv6"}[VARIANTS[variant].decay]
    scale = VARIANTS[x.variant].scale or x.shape.K**-0.5
    problem = Problem.checked(q, k, v, g, u, state.double(), packed, variant, scale, reverse)
    with torch.no_grad():
        output, final_state = formula(problem)
        grads = gradients_of(formula, problem, d_output.double(), d_state.double())
    return {"output": output, "final state": final_state} | {n: t for n, t in grads._asdict().items() if t is not None}


def sizes_of_errors(x: Inputs, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest error over largest value. A constant decay's gradient is a sum over tokens: errors of its terms may add up, and are
    relative to what the terms add up to without their signs."""
    sizes = {name: error(found[name], wanted[name]) for name in wanted}
    if VARIANTS[x.variant].decay in ("H", "HK"):
        of_sum = found["g"].double() - (wanted["g"].sum((0, 1)) if found["g"].dim() < wanted["g"].dim() else wanted["g"])
        apart = of_sum.abs() if found["g"].dim() < wanted["g"].dim() else of_sum.abs().sum((0, 1))
        sizes["g"] = float(apart.max() / wanted["g"].abs().sum((0, 1)).max().clamp(min=1e-30))
    return sizes


def hold(x: Inputs, impl: str, packed: torch.Tensor | None = None, reverse: bool = False) -> None:
    """Every result within its budget: that of float32 arithmetic, one rounding of the result, and twice the error of the formula
    with operands as rounded as the implementation's. (There decays are no stronger than e^-10, so that its factors are finite;
    what is left of a token then is too little to matter. And sequences are not packed: it rounds the same operands.)"""
    wanted = exact(x, chunkwise.forward, packed, reverse)
    bits = FAMILY.named(impl).operands(x.q.dtype)
    rounded = {}
    if bits is not None:
        tame = x if x.g is None else replace(x, g=x.g.clamp(min=-10.0))
        found, same = (exact(tame, formula, None, reverse) for formula in (partial(rounding.forward, bits=bits), chunkwise.forward))
        rounded = sizes_of_errors(x, found, same)
    found = results(x, impl, packed, reverse)
    over = {}
    for name, apart in sizes_of_errors(x, found, wanted).items():
        allowed = growth(x.shape.T) * budget(x.q.dtype, found[name].dtype) + 2 * rounded.get(name, 0.0)
        if not apart <= allowed:
            over[name] = f"{apart:.2e}, allowed {allowed:.2e}"
    assert not over, over


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 512), (100, 100), (20, 36), (64, 200), (128, 64), (64, 192)], ids=str)
def test_head_sizes(variant, dtype, sizes):
    hold(inputs(variant, Shape(2, 300, 2, *sizes), dtype, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (100, 36), (512, 512)], ids=str)
def test_token_serial_head_sizes(variant, dtype, sizes):
    hold(inputs(variant, Shape(2, 40, 2, *sizes), dtype, "cuda"), "triton_recurrent")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (100, 36)], ids=str)
def test_float32_in_one_tf32_product_where_torch_allows_it(variant, sizes):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        hold(inputs(variant, Shape(2, 300, 2, *sizes), FLOAT32, "cuda"), "triton_chunkwise")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 129, 1000])
def test_lengths(variant, T):
    hold(inputs(variant, Shape(3, T, 2, 64, 64), BFLOAT16, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
@pytest.mark.parametrize("shape", [Shape(8, 2048, 32, 64, 64), Shape(4, 2048, 16, 128, 128), Shape(1, 16384, 8, 64, 64)], ids=str)
def test_shapes_of_models(variant, dtype, shape):
    hold(inputs(variant, shape, dtype, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("variant", ["gla", "rwkv6", "retention"])
def test_one_very_long_sequence(variant):
    """T = 131072: segments, and states that live through all of them."""
    hold(inputs(variant, Shape(1, 131072, 2, 64, 64), BFLOAT16, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("impl", ["triton_chunkwise", "triton_recurrent"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("which", ["mixture", "gone", "few", "zero"])
@pytest.mark.parametrize("variant", GATED)
def test_extreme_decays(variant, which, dtype, impl):
    hold(strong(inputs(variant, SMALL, dtype, "cuda"), which), impl)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed(variant, reverse):
    packed = torch.tensor([0, 0, 5, 70, 70, 71, 900, 1024], device="cuda")
    hold(inputs(variant, Shape(1, 1024, 4, 64, 64), BFLOAT16, "cuda"), "triton_chunkwise", packed, reverse)


def test_offsets_beyond_two_to_the_31():
    """The last of many tokens, as if they stood alone. About 60 GB."""
    T, H, D, last = (1 << 18) + 512, 128, 64, 200
    assert T * H * D > 1 << 31
    if torch.cuda.mem_get_info()[0] < 75e9:
        pytest.skip("needs 75 GB of free memory")
    q, k, v = (torch.empty(1, T, H, D, dtype=BFLOAT16, device="cuda").normal_() for _ in range(3))
    g = torch.empty_like(q).uniform_(-0.1, 0)
    d_output = torch.empty_like(v).normal_()
    packed = torch.tensor([0, T - last, T], device="cuda")
    found = []
    for tokens, offsets in ((slice(None), packed), (slice(T - last, T), None)):
        leaves = [x[:, tokens].detach().requires_grad_() for x in (q, k, v, g)]
        output = ps.gla(*leaves, cu_seqlens=offsets, impl="triton_chunkwise").output
        grads = torch.autograd.grad(output, leaves, d_output[:, tokens])
        found.append([x[:, -last:].detach().clone() for x in (output, *grads)])
        del leaves, output, grads
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_a_pool_beyond_two_to_the_31():
    if torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("needs 10 GB of free memory")
    H, D, slots = 32, 64, (1 << 31) // (32 * 64 * 64) + 2
    pool = torch.zeros(slots, H, D, D, dtype=BFLOAT16, device="cuda")
    r, k, v = (torch.randn(2, H, D, device="cuda") for _ in range(3))
    w, u = -torch.rand(2, H, D, device="cuda"), torch.randn(H, D, device="cuda")
    output = ps.decode_step("rwkv6", r, k, v, w, u, state=pool, slots=torch.tensor([slots - 1, 0], device="cuda"))
    assert torch.allclose(output, (r * u * k).sum(-1, keepdim=True) * v, rtol=1e-4, atol=1e-4)
    assert torch.allclose(pool[[slots - 1, 0]].float(), k[..., None] * v[..., None, :], rtol=1e-2, atol=1e-2)
    assert not pool[1:-1].any()


def call(x: Inputs, packed: torch.Tensor | None = None):
    """Forward and backward; what they give."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.u)]
    output = _run(x.variant, *leaves, None, None, True, packed, False, "auto").output
    return [output.detach(), *torch.autograd.grad(output, [t for t in leaves if t is not None], x.v)]


def step(x: Inputs, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ps.decode_step(x.variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_waits_for_the_device(variant):
    """Neither a first call, whose launches are planned and compiled, nor later ones."""
    x, one = inputs(variant, Shape(1, 333, 2, 64, 64), BFLOAT16, "cuda"), inputs(variant, Shape(3, 2, 2, 64, 64), BFLOAT16, "cuda")
    packed = torch.tensor([0, 100, 333], device="cuda")
    pool, slots = torch.zeros(4, 2, 64, 64, device="cuda"), torch.tensor([2, -1, 0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            call(x)
            call(x, packed)
            step(one, pool, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
def test_calls_can_be_captured(variant):
    """A CUDA graph replays forward, backward and a decode step on new values."""
    shape = Shape(1, 200, 2, 64, 64)
    x, other = (inputs(variant, shape, BFLOAT16, "cuda", seed=seed) for seed in (0, 1))
    packed = torch.tensor([0, 50, 200], device="cuda")
    one = inputs(variant, Shape(3, 1, 2, 64, 64), BFLOAT16, "cuda")
    pool, slots = torch.zeros(4, 2, 64, 64, device="cuda"), torch.tensor([2, -1, 0], device="cuda")
    everything = lambda y: [*call(y), *call(y, packed)]  # noqa: E731
    wanted = [everything(x), everything(other)]
    step(one, pool, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = everything(x)
        token = step(one, pool, slots)
    for values, expected in zip((x, other), wanted):
        for name, tensor in values.tensors.items():
            x.tensors[name].copy_(tensor)
        pool.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        again = pool.clone()
        pool.zero_()
        assert torch.equal(token, step(one, pool, slots))
        assert torch.equal(pool, again)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_two_runs_are_bitwise_equal(variant, dtype):
    x = inputs(variant, Shape(4, 777, 4, 64, 64), dtype, "cuda")
    first = call(x)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, call(x)))


@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_memory_beyond_inputs_and_results(variant):
    """Backward: the states before chunks and their gradients behind, bfloat16, 4 bytes an element at K = V = 64; 1 byte for segments."""
    x = inputs(variant, Shape(4, 2048, 16, 64, 64), BFLOAT16, "cuda")
    elements = x.q.numel()
    call(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call(x)
    results = sum(t.numel() * t.element_size() for t in found)
    assert torch.cuda.max_memory_allocated() - before - results < 5.5 * elements


@pytest.mark.parametrize("sizes", [(3, 200, 1, 64, 64), (2, 200, 1, 128, 128)], ids=str)
def test_one_head(sizes):
    hold(inputs("gla", Shape(*sizes), BFLOAT16, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("size", [64, 128])
def test_expanded_tensors_and_gradients(size):
    """Keys shared by heads, and losses whose gradient is: strides of 0, which are no matrix of rows."""
    x = inputs("gla", Shape(2, 300, 4, size, size), BFLOAT16, "cuda")
    key = x.k[:, :, :1].detach()
    found = []
    for k in (key.expand_as(x.k), key.expand_as(x.k).contiguous()):
        leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.v, x.g)]
        q, v, g = leaves
        output = ps.gla(q, k, v, g).output
        weights = torch.linspace(-1, 1, size, device="cuda", dtype=BFLOAT16)
        found.append([output, *torch.autograd.grad((output.sum(2) * weights).sum(), leaves)])
    for one, other in zip(*found):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


@pytest.mark.parametrize("shape", [(1, 65536, 32, 64, 64), (16, 2048, 32, 64, 64), (4, 16384, 16, 128, 128)], ids=str)
def test_kept_states_are_finite_where_programs_start_beside_others(shape):
    from penstock.recurrence.triton import launch

    problem = inputs("gla", Shape(*shape), BFLOAT16, "cuda").problem()
    for _ in range(5):
        states = launch.chunk_forward_pass(problem, keep=True)[2]
        assert states is not None
        assert states.isfinite().all()


def test_another_stream_and_another_thread():
    import threading

    x, found = inputs("gla", Shape(2, 500, 4, 64, 64), BFLOAT16, "cuda"), []
    wanted = call(x)
    torch.cuda.synchronize()

    def run():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(call(x))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(a, b) for one in found for a, b in zip(wanted, one))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_than_the_current_one():
    with torch.cuda.device(0):
        x = inputs("rwkv6", Shape(2, 100, 2, 64, 64), BFLOAT16, "cuda:1")
        here = inputs("rwkv6", Shape(2, 100, 2, 64, 64), BFLOAT16, "cuda:0")
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(call(x), call(here)))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
def test_compiled_graphs_hold_one_operator(variant):
    x = inputs(variant, Shape(2, 130, 2, 64, 64), BFLOAT16, "cuda")
    function = partial(getattr(ps, variant), impl="triton_chunkwise")
    wanted = function(*x.tensors.values()).output
    found = torch.compile(lambda *t: function(*t).output, fullgraph=True)(*x.tensors.values())
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("T", "name"), [(1, "triton_recurrent"), (54, "cuda"), (4096, "triton_chunkwise")])
def test_auto_chooses_by_length(T, name):
    if name == "cuda":
        pytest.importorskip("cuda.core")
    x = inputs("rwkv6", Shape(1, T, 4, 64, 64), BFLOAT16, "cuda")
    assert ps.explain("rwkv6", *x.tensors.values()).forward == name


@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(("N", "T"), [(3, 1), (3, 3), (3, 16), (2000, 1), (2000, 3)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_steps(variant, N, T, kind):
    """In place, out of order, one skipped, in a pool of either dtype, against the oracle; few sequences, and enough to fill the GPU."""
    x = inputs(variant, Shape(N, T, 2, 64, 64), FLOAT32, "cuda")
    random = torch.Generator("cuda").manual_seed(3)
    pool = torch.randn(N + 2, 2, 64, 64, generator=random, device="cuda").to(kind)
    slots, wanted = torch.randperm(N + 2, generator=random, device="cuda")[:N], pool.double()
    slots[1] = -1
    doubles = [None if t is None else t.double() for t in (x.q, x.k, x.v, x.g, x.u)]
    expected = ps.decode_step(variant, *doubles, state=wanted, slots=slots, impl="chunkwise")
    found = step(x, pool, slots)
    assert error(found, expected) < 2e-6
    assert error(pool, wanted) < (2e-6 if kind == FLOAT32 else torch.finfo(kind).eps)


def test_wrong_values_are_seen_inside_checks():
    x = inputs("gla", Shape(1, 10, 2, 16, 16), FLOAT32, "cuda")
    with ps.checks(), pytest.raises(ps.RangeError):
        ps.gla(x.q, x.k, x.v, -x.g)
