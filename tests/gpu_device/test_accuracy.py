"""The recurrence on a GPU against exact formulas: large and odd shapes, every dtype, extreme decays. Run with ``pytest -m gpu``.

``cuda`` computes two of the variants; everything else is asked of all.
"""

from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.bench import ladder
from penstock.call.derivatives import gradients_of
from penstock.recurrence import chunkwise, cuda, rounded
from penstock.recurrence.cuda.sizes import HEADS
from penstock.recurrence.gradients import Gradients
from penstock.recurrence.operators import FAMILY, RECURRENCE
from penstock.recurrence.variants import VARIANTS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs
from penstock.verify.oracle import budget, error, exact_forward, growth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
GATED = [name for name, row in VARIANTS.items() if row.decay]
WITH_CUDA = ["rwkv5", "rwkv6"]
"""Variants that ``cuda`` computes."""
needs_cuda = pytest.mark.skipif(cuda.available() is not None, reason="cuda-core is not installed")
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
    found = RECURRENCE(x.variant, (*leaves, packed, state), (None, reverse, True), impl)
    asked = [t for t in (*leaves, state) if t is not None]
    grads = iter(torch.autograd.grad(found, asked, (d_output, d_state)))
    names = [name for name, t in zip(Gradients._fields, (*leaves, state)) if t is not None]
    return {"output": found[0].detach(), "final state": found[1].detach()} | dict(zip(names, grads))


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
    problem = RECURRENCE.checked(variant, (q, k, v, g, u, packed, state.double()), (scale, reverse, True))
    with torch.no_grad():
        output, final_state = formula(problem.whole)
        grads = dict(zip(Gradients._fields, gradients_of(lambda p: formula(p.whole), problem, (d_output.double(), d_state.double()))))
    return {"output": output, "final state": final_state} | {name: t for name, t in grads.items() if t is not None}


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
    with operands as rounded as the implementation's."""
    wanted = exact(x, chunkwise.forward, packed, reverse)
    bits = FAMILY.named(impl).operands(x.q.dtype, "forward")
    rounding: dict[str, float] = {}
    if bits is not None:
        draws = [sizes_of_errors(x, exact(x, formula, packed, reverse), wanted) for formula in rounded.formulas(bits)]
        rounding = {name: max(draw[name] for draw in draws) for name in wanted}
    found = results(x, impl, packed, reverse)
    over = {}
    for name, apart in sizes_of_errors(x, found, wanted).items():
        allowed = growth(x.shape.T) * budget(x.q.dtype, found[name].dtype) + 2 * rounding.get(name, 0.0)
        if not apart <= allowed:
            over[name] = f"{apart:.2e}, allowed {allowed:.2e}"
    assert not over, over


SIZES = [(64, 64), (128, 128), (256, 512), (100, 100), (20, 36), (64, 200), (128, 64), (64, 192), (1000, 600)]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_head_sizes(variant, dtype, sizes):
    hold(inputs(variant, Shape(2, 300, 2, *sizes), dtype, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (100, 36), (512, 512)], ids=str)
def test_head_sizes_token_by_token(variant, dtype, sizes):
    hold(inputs(variant, Shape(2, 40, 2, *sizes), dtype, "cuda"), "triton_recurrent")


@needs_cuda
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", WITH_CUDA)
@pytest.mark.parametrize("head", HEADS)
def test_head_sizes_of_cuda(variant, head, dtype):
    """Several sequences, each with a state of its own."""
    hold(inputs(variant, Shape(3, 300, 2, head, head), dtype, "cuda"), "cuda")


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


@needs_cuda
@pytest.mark.parametrize("variant", WITH_CUDA)
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 15, 16, 17, 54, 63, 65, 1000, 4100])
def test_lengths_of_cuda(variant, T):
    hold(inputs(variant, Shape(2, T, 2, 64, 64), FLOAT32, "cuda"), "cuda")


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("variant", ["gla", "rwkv6"])
@pytest.mark.parametrize("shape", [Shape(8, 2048, 32, 64, 64), Shape(4, 2048, 16, 128, 128), Shape(1, 16384, 8, 64, 64)], ids=str)
def test_shapes_of_models(variant, dtype, shape):
    hold(inputs(variant, shape, dtype, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("variant", ["gla", "rwkv6", "retention"])
def test_one_very_long_sequence(variant):
    """T = 131072: segments, and states that live through all of them."""
    hold(inputs(variant, Shape(1, 131072, 2, 64, 64), BFLOAT16, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("variant", ["linear_attention", "retention", "simple_gla"])
def test_walks_over_sequences(variant, K):
    """Programs fill the GPU: on Hopper one walks over a whole sequence of a head. Two are on a multiprocessor, or one."""
    x = inputs(variant, Shape(3, 300, 64, K, 64), BFLOAT16, "cuda")
    for one in (x, *(strong(x, which) for which in ("mixture", "gone", "few", "zero") if variant == "simple_gla")):
        hold(one, "triton_chunkwise")
    packed = torch.tensor([0, 0, 5, 70, 70, 71, 900, 1024], device="cuda")
    hold(inputs(variant, Shape(1, 1024, 64, K, 64), BFLOAT16, "cuda"), "triton_chunkwise", packed)


@pytest.mark.parametrize("K", [64, 128])
def test_walks_of_heads_that_share_queries_and_keys(K):
    """Equal to copies for every head, bit for bit. As one group, another kernel computes the gradients, and those of q and k are sums."""
    x = inputs("simple_gla", Shape(2, 700, 80, K, 64), BFLOAT16, "cuda")
    group = replace(x, q=x.q[:, :, :1], k=x.k[:, :, :1])
    shared = replace(x, q=group.q.expand_as(x.q), k=group.k.expand_as(x.k))
    found = []
    for one in (shared, replace(x, q=shared.q.contiguous(), k=shared.k.contiguous()), group):
        leaves = [t.detach().requires_grad_() for t in (one.q, one.k, one.v, one.g)]
        output = ps.simple_gla(*leaves, impl="triton_chunkwise").output
        found.append([output, *torch.autograd.grad(output, leaves, one.v)])
    expanded, copied, grouped = found
    assert all(torch.equal(one, other) for one, other in zip(expanded, copied))
    assert torch.equal(expanded[0], grouped[0])
    for place in (1, 2, 3, 4):
        wanted = expanded[place].double()
        if place < 3:
            wanted = wanted.sum(2, keepdim=True)
        assert grouped[place].shape == wanted.shape
        assert (grouped[place] - wanted).norm() <= 2**-8 * wanted.norm()


@pytest.mark.parametrize("G", [1, 2, 4])
@pytest.mark.parametrize("K", [64, 100, 128])
@pytest.mark.parametrize("variant", ["linear_attention", "retention", "simple_gla"])
def test_heads_that_share_queries_and_keys(variant, K, G):
    """Whole and shorter chunks; a group's heads in one program or in several."""
    for B in (1, 24):
        x = inputs(variant, Shape(B, 300, 8, K, 64), BFLOAT16, "cuda")
        x = replace(x, q=x.q[:, :, :G], k=x.k[:, :, :G])
        for one in (x, *(strong(x, which) for which in ("mixture", "gone", "few", "zero") if variant == "simple_gla" and B == 1)):
            hold(one, "triton_chunkwise")
    hold(x, "triton_chunkwise", reverse=True)
    x = inputs(variant, Shape(1, 1024, 8, K, 48), BFLOAT16, "cuda")
    packed = torch.tensor([0, 0, 5, 70, 70, 71, 900, 1024], device="cuda")
    hold(replace(x, q=x.q[:, :, :G], k=x.k[:, :, :G]), "triton_chunkwise", packed)


@pytest.mark.parametrize("sizes", [(3, 200, 1, 64, 64), (2, 200, 1, 128, 128)], ids=str)
def test_one_head(sizes):
    hold(inputs("gla", Shape(*sizes), BFLOAT16, "cuda"), "triton_chunkwise")


@pytest.mark.parametrize("impl", ["triton_chunkwise", "triton_recurrent"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("which", ["mixture", "gone", "few", "zero"])
@pytest.mark.parametrize("variant", GATED)
def test_extreme_decays(variant, which, dtype, impl):
    hold(strong(inputs(variant, SMALL, dtype, "cuda"), which), impl)


@needs_cuda
@pytest.mark.parametrize("variant", WITH_CUDA)
@pytest.mark.parametrize("which", ["mixture", "gone", "few", "zero"])
@pytest.mark.parametrize("head", [64, 128])
def test_extreme_decays_of_cuda(variant, which, head):
    hold(strong(inputs(variant, Shape(2, 200, 2, head, head), FLOAT32, "cuda"), which), "cuda")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("variant", "impl"),
    [*((name, "triton_chunkwise") for name in VARIANTS), *(pytest.param(name, "cuda", marks=needs_cuda) for name in WITH_CUDA)],
)
def test_packed(variant, impl, reverse):
    packed = torch.tensor([0, 0, 5, 70, 70, 71, 900, 1024], device="cuda")
    hold(inputs(variant, Shape(1, 1024, 4, 64, 64), BFLOAT16, "cuda"), impl, packed, reverse)


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
def test_saved_states_are_finite_with_concurrent_programs(shape):
    from penstock.recurrence.triton import launch

    problem = inputs("gla", Shape(*shape), BFLOAT16, "cuda").problem()
    for _ in range(5):
        (states,) = launch.chunk_forward(problem, keep=True)[2]
        assert states is not None
        assert states.isfinite().all()


@pytest.mark.parametrize("kind", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(("N", "T"), [(3, 1), (3, 3), (3, 16), (2000, 1), (2000, 3)])
@pytest.mark.parametrize(
    ("variant", "dtype", "impl", "limit"),
    [
        *((name, FLOAT32, "auto", 2e-6) for name in VARIANTS),
        *(pytest.param(name, dtype, "cuda", 1e-6, marks=needs_cuda) for name in WITH_CUDA for dtype in (FLOAT32, BFLOAT16)),
    ],
)
def test_decode_steps(variant, dtype, impl, limit, N, T, kind):
    """In place, out of order, one skipped, in a pool of either dtype; few sequences, and many.

    ``cuda`` rounds a state once, the others after each token. Float32 results may round to a neighbour there, which moves later outputs.
    """
    x = inputs(variant, Shape(N, T, 2, 64, 64), dtype, "cuda")
    random = torch.Generator("cuda").manual_seed(3)
    pool = torch.randn(N + 2, 2, 64, 64, generator=random, device="cuda").to(kind)
    slots, wanted = torch.randperm(N + 2, generator=random, device="cuda")[:N], pool.double()
    slots[1] = -1
    doubles = [None if t is None else t.double() for t in (x.q, x.k, x.v, x.g, x.u)]
    steps = []
    for t in range(T):
        token = [one if one is None or one.dim() < 3 else one[:, t : t + 1] for one in doubles]
        steps.append(ps.decode_step(variant, *token, state=wanted, slots=slots, impl="chunkwise"))
        if impl != "cuda":
            wanted.copy_(wanted.to(kind))
    expected = torch.cat(steps, 1)
    found = ps.decode_step(variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots, impl=impl)
    neighbours = 0 if kind == FLOAT32 or impl == "cuda" or T == 1 else torch.finfo(kind).eps
    assert error(found, expected) < limit + neighbours + (0 if dtype == FLOAT32 else torch.finfo(dtype).eps)
    assert error(pool, wanted) < (limit if kind == FLOAT32 else torch.finfo(kind).eps)
    assert kind == FLOAT32 or (pool != wanted.to(kind)).float().mean() < 0.02
    assert not found[1].any()


@pytest.mark.parametrize(
    ("variant", "impl"), [*((name, "auto") for name in VARIANTS), *(pytest.param(name, "cuda", marks=needs_cuda) for name in WITH_CUDA)]
)
def test_rows_of_any_length_advance(variant, impl):
    """Decode rows and prompts together, one skipped, the others in any order."""
    lengths = torch.tensor([0, 1, 63, 64, 65, 130, 700])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda")
    x = inputs(variant, Shape(1, int(lengths.sum()), 2, 64, 64), FLOAT32, "cuda")
    random = torch.Generator("cuda").manual_seed(4)
    pool = torch.randn(9, 2, 64, 64, generator=random, device="cuda")
    slots, wanted = torch.tensor([4, 0, -1, 2, 7, 5, 8], device="cuda"), pool.double()
    doubles = [None if t is None else t.double() for t in (x.q, x.k, x.v, x.g, x.u)]
    expected = ps.advance(variant, *doubles, state=wanted, slots=slots, cu_seqlens=ends, impl="chunkwise")
    found = ps.advance(variant, x.q, x.k, x.v, x.g, x.u, state=pool, slots=slots, cu_seqlens=ends, impl=impl)
    assert error(found, expected) < 2e-6
    assert error(pool, wanted) < 2e-6
    assert not found[:, 1:64].any()


@needs_cuda
def test_views_of_one_projection():
    """Slices of [B,T,4 * H * n], as Hugging Face models have them: equal to contiguous copies, bit for bit."""
    B, T, H, n = 2, 100, 4, 64
    wide = torch.randn(B, T, 4 * H * n, device="cuda")
    wide[..., 3 * H * n :] = torch.nn.functional.logsigmoid(wide[..., 3 * H * n :])
    r, k, v, w = (x.unflatten(-1, (H, n)) for x in wide.chunk(4, -1))
    u = torch.randn(H, n, device="cuda")
    assert not any(x.is_contiguous() for x in (r, k, v, w))
    found = ps.rwkv6(r, k, v, w, u, impl="cuda").output
    assert torch.equal(found, ps.rwkv6(*(x.contiguous() for x in (r, k, v, w)), u, impl="cuda").output)


@needs_cuda
@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_of_the_ladder_equals_the_oracle(name):
    x = inputs("rwkv6", Shape(2, 200, 3, 64, 64), FLOAT32, "cuda")
    assert error(ladder.rung(name, x, "fwd").forward(x), exact_forward(x)[0]) < ladder.BUDGET
