"""The Triton kernels of the delta rule, under the interpreter (on a GPU: compiled): rows, gates, keys, lengths, both passes, in place."""

from dataclasses import replace
from functools import partial

import contract
import pytest
import torch
import triton
import triton.language as tl
from contract import check_contract
from delta_cases import gates, interpreted_cases, interpreted_pooled_cases, key_cases, raw_cases
from deltas import Delta, PooledDelta, named, oracle
from interpreted import within_bounds
from sampling import every, slow
from triton.runtime.errors import InterpreterError

import penstock as ps
from penstock.call.memory import Memory
from penstock.delta import inputs
from penstock.delta.operators import DELTA
from penstock.delta.triton import calls, launch, plan
from penstock.delta.triton.forms import chunks
from penstock.delta.variants import VARIANTS
from penstock.gpu.target import Target

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
"""NumPy's, of values in the interpreter that masks discard."""
ROWS = list(VARIANTS)
LENGTHS = (0, 63, 65, 5, 0, 64)


@pytest.mark.parametrize("T", [1, *slow(63, 64), 65, *slow(200)])
@pytest.mark.parametrize("variant", ROWS)
def test_chunks_equal_the_oracle(variant, T):
    check_contract(Delta(variant, B=1, H=2, T=T, K=20, V=12), "triton_chunkwise")


MORE = [case for variant in ROWS for case in interpreted_cases(variant)]


@pytest.mark.parametrize("case", [*every(40, MORE), *slow(*MORE)], ids=str)
@pytest.mark.parametrize("impl", ["triton_chunkwise", *slow("triton_recurrent")])
def test_calls_equal_the_oracle(case, impl):
    check_contract(case, impl)


def test_shared_heads_do_not_take_the_plan_of_copies(monkeypatch):
    """Gradients of shared heads are float32 until they are summed, whatever equal call came before."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random).half()

    q, k, v, upstream = normal(1, 70, 2, 16), torch.nn.functional.normalize(normal(1, 70, 2, 16), dim=-1), *normal(2, 1, 70, 4, 8)
    g, beta = -normal(1, 70, 4).abs(), normal(1, 70, 4).sigmoid()

    def gradients(q, k):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        return torch.autograd.grad(ps.gated_delta_rule(*leaves, scale=0.5, impl="triton_chunkwise").output, leaves, upstream)

    def of_copies():
        return gradients(q.repeat_interleave(2, 2), k.repeat_interleave(2, 2))

    found = []
    for before in ((), (of_copies, of_copies)):  # the second equal call is kept
        monkeypatch.setattr(DELTA, "memory", Memory())
        for call in before:
            call()
        found.append(gradients(q, k))
    for alone, after in zip(*found):
        assert torch.equal(alone, after)


GATED = [Delta(variant, B=1, H=1, T=70, K=12, V=8, gate=gate) for variant in ("gated_delta_rule", "kda", "dplr") for gate in gates(variant)]


@pytest.mark.parametrize("case", [*every(6, GATED), *slow(*GATED)], ids=str)
def test_any_gate_equals_the_oracle(case):
    check_contract(case, "triton_chunkwise")


CORRELATED = [
    case for variant in ("delta_rule", "kda") for case in key_cases(variant) if case.dtype == torch.float32 and case.beta is not None
]


@pytest.mark.parametrize("case", [*every(7, CORRELATED), *slow(*CORRELATED)], ids=str)
def test_correlated_keys_equal_the_oracle(case):
    check_contract(case, "triton_chunkwise")


@pytest.mark.parametrize("variant", ["kda", *slow("rwkv7", "gated_delta_rule", "delta_rule")])
def test_packed_sequences_and_wide_heads_equal_the_oracle(variant):
    gate = "spikes" if VARIANTS[variant].decay else "logsigmoid"
    check_contract(Delta(variant, H=1, lengths=LENGTHS, K=12, V=20, gate=gate), "triton_chunkwise")
    check_contract(Delta(variant, B=1, H=1, T=70, K=100, V=70), "triton_chunkwise")


WIDE = [
    Delta("gated_delta_rule", B=1, H=1, T=70, K=136, V=40),
    Delta("kda", H=1, lengths=(0, 66, 3), K=192, V=20, gate="spikes", dtype=torch.float16),
    Delta("rwkv7", B=1, H=2, G=1, T=66, K=256, V=24),
    *slow(
        Delta("delta_rule", B=1, H=2, G=1, T=70, K=160, V=40),
        Delta("gated_delta_rule", B=1, H=1, T=65, K=256, V=512, dtype=torch.float16),
        Delta("gated_delta_rule", H=1, lengths=LENGTHS, K=192, V=40, gate="spikes"),
        Delta("gated_delta_rule", B=1, H=1, T=70, K=256, V=72, raw=True, strided=True),
        Delta("kda", B=1, H=1, T=70, K=256, V=512),
        Delta("kda", B=1, H=2, T=66, K=136, V=40, raw=True, bound=-0.5, state=False),
        Delta("dplr", B=1, H=1, T=70, K=160, V=40, gate="mixture"),
        Delta("rwkv7", H=1, lengths=(70, 0, 64), K=192, V=40, raw=True),
    ),
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_heads_of_up_to_256_key_channels_equal_the_oracle(case):
    check_contract(case, "triton_chunkwise")


@pytest.mark.parametrize("variant", ["kda", *slow("gated_delta_rule")])
def test_blocks_that_divide_the_key_channels_equal_the_oracle(variant, monkeypatch):
    """Blocks of 16, as on sm_80 in float32: tiles have 128 columns, and those from 80 on are 0."""
    blocks = calls.config
    monkeypatch.setattr(calls, "config", lambda kernel, *of: blocks(kernel, *of)._replace(**{"BJ": 16} if kernel == "prepare" else {}))
    check_contract(Delta(variant, B=1, H=2, T=66, K=80, V=20), "triton_chunkwise")


@pytest.mark.parametrize("low", [16, 64])
@pytest.mark.parametrize("variant", ["kda", *slow("rwkv7")])
def test_anchors_equal_the_oracle(variant, low, monkeypatch):
    """One anchor in blocks of 16 or 64 tokens, for decays that are bounded."""
    monkeypatch.setattr(calls.Call, "low", property(lambda call: low))
    check_contract(Delta(variant, B=1, H=1, T=70, K=12, V=8, gate="logsigmoid/16"), "triton_chunkwise")


BOUNDED = [replace(one, T=70, K=12, V=8) for one in raw_cases(Delta("rwkv7", B=1, H=1)) if one.dtype != torch.bfloat16]
BOUNDED += [
    Delta("kda", B=1, H=1, T=70, K=12, V=8, raw=True, bound=bound, centre=centre) for bound in (-5.0, -0.5) for centre in (0.0, 9.0)
]


@pytest.mark.parametrize("case", [*every(5, BOUNDED), *slow(*BOUNDED)], ids=str)
def test_bounded_gates_equal_the_oracle(case):
    """With as few levels as the bound allows, up to the strongest decays."""
    check_contract(case, "triton_chunkwise")


RAW = Delta("rwkv7", B=1, H=1, T=130, K=12, V=8, raw=True)
WITHOUT_LEVELS = [replace(RAW, centre=centre) for centre in (-9.0, 0.0, 9.0)]
WITHOUT_LEVELS += [replace(RAW, dtype=torch.float16, others=torch.float32, lengths=(0, 5, 64, 1, 81, 0), centre=2.0)]
WITHOUT_LEVELS += [replace(RAW, H=4, G=2, removed=removed, T=70, strided=True, state=False) for removed in (2, 4)]
WITHOUT_LEVELS += [replace(RAW, T=64, K=64, V=64), replace(RAW, T=70, key="equal", centre=-5.0)]


@pytest.mark.parametrize("case", [*every(3, WITHOUT_LEVELS), *slow(*WITHOUT_LEVELS)], ids=str)
def test_one_anchor_in_a_chunk_equals_the_oracle(case, monkeypatch):
    """Prepared without levels, in float32: factors are up to exp(39), with errors of 39 times 2^-24 each."""
    monkeypatch.setattr(calls, "MOST_DECAY_FLOAT32", calls.MOST_DECAY)
    found, wanted, launched = contract.measured(case, "triton_chunkwise"), oracle(case), launches_of(case)
    assert launched == [{"penstock_delta_prepare_anchored"}] * 2
    for name, x in found.items():
        rounding = 2**-11 if x.dtype == torch.float16 else 0
        assert x.isfinite().all(), name
        assert float((x.double() - wanted[name].value).norm()) <= (1e-5 + rounding) * wanted[name].size, name


def launches_of(case):
    """The kernels that prepare chunks in both passes of a call."""
    problem = DELTA.checked(case.variant, [case.tensors().get(name) for name in DELTA.names], case.options)
    p = inputs.of_every_head(inputs.canonical(problem, inputs.uncomputed(problem, False)))
    target = Target.of(p.q.device)
    plans = plan.chunk_forward_plan(p, target), plan.chunk_backward_plan(p, torch.empty_like(p.v), None, target)
    return [{name for one in made.launches if "prepare" in (name := one.kernel.fn.__name__)} for made in plans]


ROUNDED = Target("sm_90", 132, 232448)
"""A GPU on which operands are rounded."""


@pytest.mark.parametrize(
    ("variant", "bound", "dtype", "low", "pairs"),
    [
        ("rwkv7", None, torch.float16, 16, "2 levels and one anchor in 16 tokens, because decays are at least -0.6065"),
        ("rwkv7", None, torch.bfloat16, 64, "one anchor in 64 tokens, because decays are at least -0.6065"),
        ("rwkv7", None, torch.float32, 16, "2 levels and one anchor in 16 tokens, because decays are at least -0.6065"),
        ("kda", -5.0, torch.bfloat16, 8, "3 levels and one anchor in 8 tokens, because decays are at least -5"),
        ("kda", -5.0, torch.float16, 0, "6 levels, because a bound of -5 is too far from 0"),
        ("kda", -5.0, torch.float32, 0, "6 levels, because a bound of -5 is too far from 0"),
        ("kda", None, torch.float16, 0, "6 levels, because no bound of the decays is known"),
    ],
)
def test_levels_follow_from_the_bound_of_raw_gates(variant, bound, dtype, low, pairs):
    case = Delta(variant, B=1, H=1, T=70, K=12, V=8, raw=True, dtype=dtype, bound=bound)
    problem = DELTA.checked(variant, [case.tensors().get(name) for name in DELTA.names], case.options)
    call = calls.Forward.of(inputs.canonical(problem, inputs.uncomputed(problem, False)), ROUNDED)
    assert (call.low, chunks.pairs(call, call.low)) == (low, pairs)
    assert call.anchored == (low == 64)


def test_explained_levels():
    case = Delta("rwkv7", B=1, H=1, T=70, K=12, V=8, raw=True)
    for one, pairs in ((case, "2 levels and one anchor in 16 tokens, "), (replace(case, raw=False), "6 levels, ")):
        call = named(one, one.tensors(), one.row.query, one.row.gate)
        text = str(ps.explain("rwkv7", **call, impl="triton_chunkwise"))
        assert text.count(f"    pairs: {pairs}") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter checks addresses")
@pytest.mark.parametrize("variant", ["kda", *slow(*(name for name in ROWS if name != "kda"))])
def test_kernels_stay_within_their_tensors(variant):
    """Both passes and an update in place, of sizes that blocks do not divide and of sizes that they divide."""
    with within_bounds():
        for case in (Delta(variant, B=1, H=2, T=70, K=20, V=12), Delta(variant, B=1, H=1, T=64, K=64, V=64)):
            contract.run(case, case.tensors(), case.upstream(), "triton_chunkwise")
        pooled = PooledDelta(variant, H=1, K=8, V=12, lengths=(3, 70, 64), slots=(5, 2, 7))
        contract.run(pooled, pooled.tensors(), (), "triton_recurrent")


def test_a_load_outside_of_all_tensors_is_found():
    x = torch.zeros(64)
    with within_bounds(), pytest.raises(InterpreterError, match="1 elements are outside"):
        beyond[(1,)](x, SIZE=64)


@triton.jit
def beyond(x, SIZE: tl.constexpr):
    tl.load(x + 1 + tl.arange(0, SIZE))


def test_heads_that_are_too_wide_are_refused():
    x = torch.zeros(1, 3, 1, 300)
    with pytest.raises(ps.ImplementationRefused, match="heads of at most K = 256, these have 300"):
        ps.delta_rule(x, x, x, x[..., 0], impl="triton_chunkwise")


POOLED = [case for variant in ROWS for case in interpreted_pooled_cases(variant)]
POOLED += [
    PooledDelta(variant, H=1, K=K, V=20, lengths=(3, 70, 64), slots=(5, 2, 7)) for variant, K in (("gated_delta_rule", 192), ("kda", 136))
]


@pytest.mark.parametrize("case", [*every(4, POOLED), *slow(*POOLED)], ids=str)
def test_updates_in_place_equal_the_oracle(case):
    check_contract(case, "triton_recurrent")


UNCUT = [(variant, raw) for variant in ROWS for raw in (False, True) if not raw or VARIANTS[variant].raw]


@pytest.mark.parametrize("call", [("kda", False), ("kda", True), *slow(*UNCUT)], ids=str)
def test_cuts_at_multiples_of_64_tokens_change_no_bit(call):
    """Raw inputs are computed by the token-serial kernel in calls of fewer than 64 tokens, else before the kernels: with equal bits."""
    case = PooledDelta(call[0], H=1, K=8, V=12, lengths=(130,), slots=(2,), rows=4, raw=call[1])
    tensors = case.tensors()
    pool = tensors["state"]
    call = partial(replace(case).call, impl="triton_recurrent")
    whole = pool.clone()
    output = call(tensors | {"state": whole})
    parts, state = [], pool.clone()
    for begin, end in ((0, 64), (64, 129), (129, 130)):
        cut = {name: x[:, begin:end] if x is not None and x.dim() > 2 and name != "state" else x for name, x in tensors.items()}
        parts.append(call(cut | {"state": state, "cu_seqlens": torch.tensor([0, end - begin])}))
    assert torch.equal(torch.cat(parts, 1), output)
    assert torch.equal(state, whole)


@pytest.mark.parametrize("gate", [("kda", None), ("kda", -5.0), ("rwkv7", None), *slow(("gated_delta_rule", None))], ids=str)
def test_raw_inputs_of_all_sizes(gate):
    """Canonical tensors of the kernel, from gates and logits between -inf and inf, q and k of 0 and of 1e15. A NaN stays NaN."""
    variant, bound = gate
    case = Delta(variant, B=1, H=2, T=37, K=5, V=4, raw=True, bound=bound, biased=False)
    tensors = case.tensors()
    wide = torch.tensor([0.0, 1e-6, 0.01, 1.0, 20.0, 90.0, 1e4, torch.inf])
    for name in ("raw", "beta"):
        if tensors[name] is not None:
            flat = tensors[name].reshape(-1)
            flat[:17] = torch.cat([wide, -wide, torch.tensor([torch.nan])])
            tensors[name] = flat.view(tensors[name].shape)
    tensors["q"][0, 0], tensors["k"][0, 1] = 0.0, 1e15
    double = {name: x.double() if x is not None else None for name, x in tensors.items()}
    problem, exact = (DELTA.checked(variant, [x.get(name) for name in DELTA.names], case.options) for x in (tensors, double))
    found, wanted = launch.raw_forward(problem, False), inputs.computed(exact, False)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        one, other = (y.double().clamp(min=-inputs.STRONGEST) for y in (found[name], x))  # log decays below are of a decay of 0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-37, equal_nan=True)  # exponents up to 88 have errors of 5e-6


def test_what_is_exactly_zero_has_zero_gradients():
    """A beta of 0 writes nothing: its token has no gradient of k and v, and beta has one."""
    case = Delta("kda", B=1, H=1, T=20, K=8, V=8, beta=0.0, state=False)
    check_contract(case, "triton_chunkwise")
