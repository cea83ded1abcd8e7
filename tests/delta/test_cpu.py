"""The native kernels of the delta rule against the float64 oracle, and the equality of bits that they promise."""

import zlib
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock import cpu as native
from penstock.delta import cpu
from penstock.delta.operators import ADVANCE, DELTA
from penstock.delta.variants import VARIANTS

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
CAPABILITIES = ["DEFAULT", "AVX2", "AVX512"]
HERE = torch.backends.cpu.get_cpu_capability()
RUN_HERE = CAPABILITIES[: CAPABILITIES.index(HERE) + 1] if HERE in CAPABILITIES else [HERE]
GATED = [name for name, row in VARIANTS.items() if row.decay]
GATES = {
    "logsigmoid": F.logsigmoid,
    "0": torch.zeros_like,
    "-1e-8": lambda x: torch.full_like(x, -1e-8),
    "logsigmoid/16": lambda x: F.logsigmoid(x) / 16,
    "logsigmoid/0.1": lambda x: F.logsigmoid(x) / 0.1,
    "-exp(N(2,1))": lambda x: -(x + 2).exp(),
    "some channels at -100": lambda x: torch.where(torch.arange(x.shape[-1]) % 20 == 3, -100.0, -0.01 * x.sigmoid()),
    "-8.9 at times": lambda x: torch.where(x > 1.3, -8.9, -1e-3),
    "-2661 at times": lambda x: torch.where(x > 1.3, -2661.0, -1e-3),
    "-inf at times": lambda x: torch.where(x > 1.3, -torch.inf, -0.01),
    "-inf": lambda x: torch.full_like(x, -torch.inf),
    "weak": lambda x: torch.tensor([-1e-8, -3e-8, -1e-6], dtype=x.dtype)[torch.arange(x.shape[-1]) % 3].expand_as(x).clone(),
}
"""Log decays from normal numbers."""


@dataclass(frozen=True)
class Call:
    """A call over whole sequences."""

    variant: str
    T: int = 70
    B: int = 1
    H: int = 2
    G: int = 0
    """heads of q and k, if not H"""
    J: int = 0
    """heads of a and b, if not those of q"""
    K: int = 20
    V: int = 36
    dtype: torch.dtype = FLOAT32
    others: torch.dtype | None = None
    """dtype of decay, beta and initial state, if not that of q"""
    gate: str = "logsigmoid"
    lengths: tuple[int, ...] | None = None
    """of packed sequences; then B and T follow from them"""
    state: bool = True
    strided: bool = False
    beta: float | None = None
    """of all tokens; else from 0 to 2"""
    still: bool = False
    """whether v, removals and the gradient of the output are 0: states and their gradients only decay"""

    def __str__(self):
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return "-".join([self.variant, *changed]).replace(" ", "")


def drawn(call):
    """The tensors of a call by their canonical names, as float32 values that its dtypes hold exactly."""
    row, rng = VARIANTS[call.variant], torch.Generator().manual_seed(zlib.crc32(str(call).encode()))
    B, T, N = (call.B, call.T, call.B) if call.lengths is None else (1, sum(call.lengths), len(call.lengths))
    H, K, V, G, others = call.H, call.K, call.V, call.G or call.H, call.others or call.dtype
    J = call.J or G

    def normal(*shape):
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def unit(*shape):
        return F.normalize(normal(*shape), dim=-1)

    x = {"q": normal(B, T, G, K), "k": unit(B, T, G, K) if row.streams == 1 else normal(B, T, G, K) / 4, "v": normal(B, T, H, V)}
    if row.decay:
        x["g"] = GATES[call.gate](normal(B, T, H, *([K] if "K" in row.decay else [])))
    if row.streams == 1:
        x["beta"] = 2 * normal(B, T, H).sigmoid()
        x["beta"][:, 1::5] = 0
        x["beta"][:, 2::5] = 2
        if call.beta is not None:
            x["beta"].fill_(call.beta)
    else:
        removed = unit(B, T, J, K)
        x["a"], x["b"] = -removed, removed * normal(B, T, J, K).sigmoid()
    if call.state:
        x["initial_state"] = normal(N, H, K, V)
    for name in {"v", "beta", "a"} & x.keys() if call.still else ():
        x[name].zero_()
    wide = ("g", "beta", "initial_state")
    x = {name: one.to(others if name in wide else call.dtype) for name, one in x.items()}
    return {name: spread(one, place) for place, (name, one) in enumerate(x.items())} if call.strided else x


def spread(x, way):
    """The same values with gaps between neighbours on the last axis, or with two axes swapped in memory."""
    if way % 2:
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def offsets(call):
    return None if call.lengths is None else torch.tensor([0, *call.lengths]).cumsum(0)


def named(call, tensors):
    """The tensors by the names of the public function."""
    names = {"q": VARIANTS[call.variant].query, "g": VARIANTS[call.variant].gate}
    return {names.get(name, name): x for name, x in tensors.items()}


def run(call, tensors, impl, upstream=None):
    """Output, final state and, of these with gradients ``upstream``, the gradients of all tensors."""
    leaves = {name: x.detach().requires_grad_(upstream is not None) for name, x in tensors.items()}
    results = getattr(ps, call.variant)(**named(call, leaves), cu_seqlens=offsets(call), output_final_state=True, impl=impl)
    found = dict(zip(("output", "final_state"), results))
    if upstream is not None:
        grads = torch.autograd.grad(results, tuple(leaves.values()), [d.to(x.dtype) for d, x in zip(upstream, results)])
        found |= {f"d{name}": grad for name, grad in zip(leaves, grads)}
    return {name: x.detach() for name, x in found.items()}


def gradients_for(call, tensors):
    """Gradients of output and final state."""
    B, T, H, V = tensors["v"].shape
    N, rng = B if call.lengths is None else len(call.lengths), torch.Generator().manual_seed(1)
    d_output = torch.randn(B, T, H, V, generator=rng).to(call.dtype) * (not call.still)
    return d_output, torch.randn(N, H, call.K, V, generator=rng)


def check(call):
    """Every result within 2e-6 of the oracle, and one rounding for 16 bits; what is exactly 0 comes out as 0."""
    tensors = drawn(call)
    upstream = gradients_for(call, tensors)
    found, wanted = run(call, tensors, "cpu", upstream), run(call, {name: x.double() for name, x in tensors.items()}, "reference", upstream)
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        exact, kind = wanted[name], torch.finfo(x.dtype)
        given = tensors.get(name.removeprefix("d"))
        assert x.shape == exact.shape, name
        assert x.dtype == (given.dtype if name[0] == "d" else FLOAT32 if name == "final_state" else call.dtype), name
        rounding = kind.eps / 2 if kind.bits == 16 else 0
        underflow = kind.smallest_normal * kind.eps / 2 * x.numel() ** 0.5
        off, size = float((x.double() - exact).norm()), float(exact.norm())
        assert off <= (2e-6 + rounding) * size + underflow, (name, off, size)  # False for NaN


@pytest.fixture
def threads():
    """Sets the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def capability(request, monkeypatch):
    """Torch reports this capability."""
    native._function.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    yield request.param
    native._function.cache_clear()


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_kernels_run_here(variant):
    """Else a library that does not load would turn the contract tests of ``cpu`` into refusals, and ``auto`` takes it."""
    assert cpu.IMPLEMENTATION.available() is None
    call = Call(variant)
    assert ps.explain(variant, **named(call, drawn(call))).chosen == {"forward": "cpu", "backward": "cpu"}


@pytest.mark.parametrize("T", [0, 1, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("variant", VARIANTS)
def test_lengths(variant, T):
    check(Call(variant, T=T, B=2, K=24, V=40))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (8, 3), (3, 130), (100, 7), (64, 64), (128, 33), (33, 200)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes(variant, K, V):
    check(Call(variant, T=35, K=K, V=V))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("variant", GATED)
def test_gates(variant, gate):
    check(Call(variant, T=200, H=1, K=40, V=24, gate=gate))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.streams == 1])
def test_betas(variant, beta):
    check(Call(variant, T=130, beta=beta, gate="logsigmoid/16"))


@pytest.mark.parametrize("still", [False, True])
@pytest.mark.parametrize("variant", GATED)
def test_rounding_errors_of_weak_decays_do_not_add_up(variant, still):
    """A state that is multiplied by 1 - 3e-8 rounds to itself, at each of 4096 tokens."""
    check(Call(variant, T=4096, H=1, K=8, V=8, gate="weak", still=still))


PACKED = [(0, 5, 64, 0, 1, 81, 0), (0, 0), (16, 16, 17), (1, 1, 1)]


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences(variant, lengths):
    check(Call(variant, lengths=lengths, gate="-inf at times"))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": BFLOAT16},
        {"dtype": FLOAT16},
        {"dtype": BFLOAT16, "others": FLOAT32},
        {"dtype": FLOAT16, "others": FLOAT32, "lengths": (0, 33, 64)},
        {"state": False},
        {"strided": True},
        {"strided": True, "dtype": BFLOAT16, "lengths": (20, 30)},
        {"H": 6, "G": 2},
        {"H": 4, "G": 1, "dtype": BFLOAT16},
        {"H": 4, "G": 2, "strided": True},
        {"H": 4, "G": 2, "J": 4},
        {"H": 4, "G": 4, "J": 4, "dtype": BFLOAT16},
        {"H": 4, "G": 1, "J": 4, "dtype": BFLOAT16},
        {"B": 0, "T": 5},
        {"B": 3, "H": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_kinds_of_calls(variant, options):
    check(replace(Call(variant), **options))


@pytest.mark.parametrize("capability", RUN_HERE, indirect=True)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set(variant, capability):
    name = {"DEFAULT": "baseline", "AVX2": "avx2", "AVX512": "avx512"}.get(capability, "baseline")
    assert native._function("delta_backward") is getattr(native._library(), f"penstock_delta_backward_{name}")
    check(Call(variant, lengths=(0, 5, 64, 1, 40)))
    check(Call(variant, K=100, V=70, T=33, strided=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_long_sequences_are_recomputed_by_spans(variant):
    """2304 tokens have two levels of checkpoints, their halves one."""
    call = Call(variant, T=2304, H=1, K=128, V=128, gate="logsigmoid/16")
    tensors = drawn(call)
    d_output, d_final = gradients_for(call, tensors)
    whole = run(call, tensors, "cpu", (d_output, d_final))
    parts = [{name: x[:, span] for name, x in tensors.items() if name != "initial_state"} for span in (slice(1152), slice(1152, None))]
    parts[0]["initial_state"] = tensors["initial_state"]
    parts[1]["initial_state"] = run(call, parts[0], "cpu")["final_state"]
    second = run(call, parts[1], "cpu", (d_output[:, 1152:], d_final))
    first = run(call, parts[0], "cpu", (d_output[:, :1152], second["dinitial_state"]))
    for name, x in whole.items():
        if name in ("final_state", "dinitial_state"):
            wanted = second[name] if name == "final_state" else first[name]
        else:
            wanted = torch.cat((first[name], second[name]), 1)
        assert float((x - wanted).norm()) <= 2e-6 * float(wanted.norm()), name


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert torch.equal(x, wanted[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_do_not_depend_on_threads(variant, threads):
    call = Call(variant, T=130, B=2, H=3, K=32, V=96, gate="-inf at times")
    tensors = drawn(call)
    found = []
    for count in (1, 2):
        threads(count)
        found.append(run(call, tensors, "cpu", gradients_for(call, tensors)))
    equal(*found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_do_not_depend_on_the_batch(variant):
    """Sequences alone, in a batch and packed; heads alone."""
    call = Call(variant, T=70, B=3, H=2, V=72)
    tensors = drawn(call)
    upstream = gradients_for(call, tensors)
    whole = run(call, tensors, "cpu", upstream)
    alone = run(call, {name: x[1:2] for name, x in tensors.items()}, "cpu", [d[1:2] for d in upstream])
    equal(alone, {name: x[1:2] for name, x in whole.items()})
    states = ("initial_state", "dinitial_state", "final_state")
    flat = {name: x if name in states else x.flatten(0, 1)[None] for name, x in tensors.items()}
    packed = run(replace(call, lengths=(70, 70, 70)), flat, "cpu", (upstream[0].flatten(0, 1)[None], upstream[1]))
    equal(packed, {name: x if name in states else x.flatten(0, 1)[None] for name, x in whole.items()})
    head = {name: x[:, 1:] if name in states else x[:, :, 1:] for name, x in tensors.items()}
    alone = run(call, head, "cpu", (upstream[0][:, :, 1:], upstream[1][:, 1:]))
    equal(alone, {name: x[:, 1:] if name in states else x[:, :, 1:] for name, x in whole.items()})


@pytest.mark.parametrize("cut", [1, 5, 16, 37, 64, 65])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_do_not_depend_on_later_tokens(variant, cut):
    """Neither on their values, NaN among them, nor on their number."""
    call = Call(variant, T=80)
    tensors = drawn(call)
    wanted = run(call, tensors, "cpu")["output"][:, :cut]
    first = {name: x if name == "initial_state" else x[:, :cut] for name, x in tensors.items()}
    assert torch.equal(run(call, first, "cpu")["output"], wanted)
    for gate in (-1.0, -torch.inf):
        changed = {name: x.clone() for name, x in tensors.items()}
        for name in changed.keys() - {"initial_state"}:
            changed[name][:, cut:] = gate if name == "g" else torch.nan
        assert torch.equal(run(call, changed, "cpu")["output"][:, :cut], wanted)


def advanced(call, tensors, pool, spans, **more):
    """The output of ``advance`` over spans of tokens, one after another, on a copy of the pool, and the pool."""
    pool, outputs = pool.clone(), []
    for begin, end in spans:
        part = {name: x[:, begin:end] for name, x in tensors.items() if name != "initial_state"}
        outputs.append(ps.advance(call.variant, **part, state=pool, impl="cpu", **more))
    return torch.cat(outputs, 1), pool


@pytest.mark.parametrize("pool", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("sizes", [{}, {"K": 64, "V": 64}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuts_of_updates_in_place(variant, sizes, pool):
    """At multiples of 64, and between single tokens of the rest, a cut changes no bit. The states are those of the oracle."""
    call = replace(Call(variant, T=197, B=2), **sizes)
    tensors = drawn(call)
    states = tensors["initial_state"].to(pool)
    output, final = advanced(call, tensors, states, [(0, 197)])
    for spans in ([(0, 64), (64, 197)], [(0, 128), (128, 192), (192, 197)], [(0, 192), *((t, t + 1) for t in range(192, 197))]):
        found = advanced(call, tensors, states, spans)
        assert torch.equal(found[0], output)
        assert torch.equal(found[1], final)
    wanted = run(call, {name: x.double() for name, x in (tensors | {"initial_state": states}).items()}, "reference")
    limit = 2e-6 if pool == FLOAT32 else 2e-2
    assert float((output - wanted["output"]).norm()) <= limit * float(wanted["output"].norm())
    assert float((final - wanted["final_state"]).norm()) <= limit * float(wanted["final_state"].norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_pool(variant, threads):
    """Sequences of several lengths on chosen rows, as each alone; other rows keep their bits; a negative slot skips its sequence."""
    lengths, slots = (3, 70, 0, 64, 1), (4, 0, 2, -1, 5)
    call = Call(variant, lengths=lengths, gate="-inf at times")
    tensors = drawn(call)
    pool = torch.randn(7, call.H, call.K, call.V, generator=torch.Generator().manual_seed(2))
    given = {"cu_seqlens": offsets(call), "slots": torch.tensor(slots)}
    threads(1)
    output, final = advanced(call, tensors, pool, [(0, sum(lengths))], **given)
    threads(2)
    again = advanced(call, tensors, pool, [(0, sum(lengths))], **given)
    assert torch.equal(again[0], output)
    assert torch.equal(again[1], final)
    wanted, begin = pool.clone(), 0
    for length, slot in zip(lengths, slots):
        span = slice(begin, begin + length)
        if slot >= 0 and length:
            alone = {name: x[:, span] for name, x in tensors.items() if name != "initial_state"}
            row = pool[slot : slot + 1].clone()
            assert torch.equal(ps.advance(variant, **alone, state=row, impl="cpu"), output[:, span])
            wanted[slot] = row[0]
        else:
            assert not output[:, span].any()
        begin += length
    assert torch.equal(final, wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pool_with_other_strides(variant):
    """Rows that are not vectors next to each other are copied, with the same results."""
    call = Call(variant, T=67, B=2, K=16, V=32)
    tensors = drawn(call)
    states = tensors["initial_state"]
    output, final = advanced(call, tensors, states, [(0, 67)])
    memory = torch.full((2, call.H, call.K + 2, 2 * call.V), 7.0)
    pool = memory[:, :, 1:-1, ::2]
    pool.copy_(states)
    part = {name: x for name, x in tensors.items() if name != "initial_state"}
    assert torch.equal(ps.advance(variant, **part, state=pool, impl="cpu"), output)
    assert torch.equal(pool, final)
    assert (memory[:, :, 0] == 7).all()
    assert (memory[..., 1::2] == 7).all()


def test_operators_have_the_implementation_first():
    for operator in (DELTA, ADVANCE):
        assert operator.family.implementations[0] is cpu.IMPLEMENTATION
