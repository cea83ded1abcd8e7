"""Every implementation of every operator against the float64 oracle of its family: results, states and all gradients."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import attention
import delta_cases
import deltas
import pytest
import torch
from cases import NAMES, SHARED, TRITON, Case, call, check_near_underflow, draw, long_cases
from contract import LAZY, check_contract, check_lazy, measured, problem_of, takers
from pools import Pooled
from summaries import Summarized
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from penstock.call.families import trials
from penstock.call.implementation import Upstream
from penstock.recurrence.variants import VARIANTS
from penstock.tokens import chunks

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS = (0, 5, 64, 0, 1, 81, 0)
SHORT_LENGTHS = (0, 5, 40, 0, 1, 33, 0)
LONG = ("cpu", "chunkwise")
"""Implementations that also run long sequences; the others are quadratic or as slow as the oracle."""
STRONG = (-0.4, -2.0, -9.0, -12.0)
"""Log decays of two tokens whose values are 0: what they leave of a state is compared with itself, however small it is."""


def cases(variant: str) -> list[Case]:
    """The contract of one variant."""
    of = Case(variant)
    gated = bool(VARIANTS[variant].decay)
    found = [replace(of, T=T, dtype=dtype) for T in (0, 1, 2, 5, 16, 17, 63, 64, 65, 130) for dtype in (FLOAT32, FLOAT64)]
    found += [replace(of, T=35, K=K, V=V) for K, V in ((20, 36), (100, 100), (8, 3), (64, 96), (1, 1), (3, 130), (200, 7))]
    found += [replace(of, T=35, K=K, V=V, dtype=FLOAT64) for K, V in ((20, 36), (8, 3))]
    found += [replace(of, dtype=dtype, T=T) for dtype in (BFLOAT16, FLOAT16) for T in (1, 65)]
    found += [replace(of, dtype=dtype, others=FLOAT32, T=33) for dtype in (BFLOAT16, FLOAT16, FLOAT64)]
    found += [replace(of, others=dtype, T=33) for dtype in (BFLOAT16, FLOAT64)]
    found += [replace(of, T=T, state=False) for T in (0, 1, 65)]
    found += [replace(of, scale=scale) for scale in (0.3, -2.0, 0.0)]
    found += [replace(of, lengths=lengths) for lengths in (LENGTHS, (0, 0), (), (16, 16, 17))]
    found += [replace(of, lengths=LENGTHS, state=False, dtype=FLOAT64), replace(of, lengths=LENGTHS, dtype=BFLOAT16, others=FLOAT32)]
    found += [replace(of, T=T, reverse=True, dtype=dtype) for T, dtype in ((1, FLOAT32), (65, FLOAT32), (65, FLOAT64))]
    found += [replace(of, lengths=LENGTHS, reverse=True, dtype=dtype) for dtype in (FLOAT32, FLOAT64)]
    found += [replace(of, T=33, strided=True, dtype=dtype) for dtype in (FLOAT32, FLOAT64, BFLOAT16)]
    found += [replace(of, lengths=LENGTHS, strided=True, reverse=True)]
    found += [replace(of, T=19, shared=axes) for axes in SHARED]
    found += [replace(of, lengths=(9, 0, 17), shared="N"), replace(of, lengths=(0, 0), shared="N")]
    found += [replace(of, B=0, T=5), replace(of, B=5, H=1, T=40), replace(of, B=1, H=9, T=40)]
    found += [replace(of, T=33, H=6, G=2), replace(of, T=70, H=4, G=1, dtype=BFLOAT16), replace(of, lengths=LENGTHS, G=1, reverse=True)]
    found += [replace(of, T=33, H=4, G=2, strided=True, dtype=FLOAT64), replace(of, T=19, H=4, G=2, shared="H"), replace(of, B=0, T=5, G=1)]
    found += [replace(of, T=5, gate=gate, still=True) for gate in (-0.3, -3.0, -30.0) if gated]
    found += [replace(of, T=2, gate=gate, still=True) for gate in STRONG if gated]
    found += [replace(of, T=130, gate=gate, dtype=dtype) for gate in ("zero", "gone", "mixture") for dtype in (FLOAT32, FLOAT64) if gated]
    found += [replace(of, T=70, gate="mixture", reverse=True)] * gated
    found += [replace(of, T=70, gate="mixture", dtype=FLOAT16), replace(of, T=70, gate="mixture", dtype=BFLOAT16)] * gated
    return found


def interpreted_cases(variant: str) -> list[Case]:
    """Each part of the Triton kernels, in sizes that the interpreter takes."""
    of = Case(variant, B=1, H=2)
    gated = bool(VARIANTS[variant].decay)
    found = [replace(of, T=T) for T in (0, 1, 16, 33, 70)] + [replace(of, B=2, T=5), replace(of, B=0, T=5)]
    found += [replace(of, T=20, K=K, V=V) for K, V in ((20, 36), (8, 3), (100, 70), (1, 1))]
    found += [replace(of, T=33, dtype=BFLOAT16, others=FLOAT32), replace(of, T=20, dtype=FLOAT16), replace(of, T=5, dtype=FLOAT64)]
    found += [replace(of, T=40, state=False, scale=-0.3), replace(of, T=40, reverse=True), replace(of, T=20, strided=True)]
    found += [replace(of, lengths=lengths) for lengths in (SHORT_LENGTHS, ())]
    found += [replace(of, lengths=SHORT_LENGTHS, reverse=True, strided=True, state=False)]
    found += [replace(of, B=2, T=7, shared=axes) for axes in ("BNH", "TKV", "overlap")]
    found += [replace(of, H=4, G=G, T=33) for G in (1, 2)] + [replace(of, H=8, G=1, T=20, dtype=FLOAT16), replace(of, B=0, T=5, G=1)]
    found += [replace(of, H=8, G=1, lengths=SHORT_LENGTHS, reverse=True, strided=True)]
    found += [replace(of, T=70, gate=gate) for gate in ("zero", "gone", "mixture") if gated]
    found += [replace(of, T=20, gate=-30.0, still=True)] * gated
    found += [replace(of, T=2, gate=gate, still=True) for gate in STRONG if gated]
    found += [replace(of, lengths=SHORT_LENGTHS, gate="mixture", reverse=True)] * gated
    return found


def sampled_cases(variant: str, impl: str) -> list[Case]:
    """The smallest cases that still cross a block of the kernels: all features for one variant, fewer for the others."""
    T = 20 if impl == "triton_recurrent" else 33
    of = Case(variant, B=1, H=1, T=T)
    lengths, gate = (0, 5, T, 0, 1), "mixture" if VARIANTS[variant].decay else "logsigmoid"
    found = [
        replace(of, H=2),
        replace(of, H=2, G=1),
        replace(of, lengths=lengths, gate=gate, reverse=True),
        replace(of, H=2, T=5, B=2, dtype=FLOAT16),
    ]
    found += [replace(of, T=2, K=4, V=4, gate=gate, still=True) for gate in STRONG if VARIANTS[variant].decay]
    if variant != "rwkv6":
        return found
    found += [replace(of, T=T) for T in (0, 1, 16)] + [replace(of, B=0, T=5), replace(of, lengths=())]
    found += [replace(of, T=17, K=K, V=V) for K, V in ((20, 36), (8, 3), (100, 70), (1, 1))]
    found += [replace(of, dtype=dtype, others=FLOAT32, T=5) for dtype in (BFLOAT16, FLOAT64)]
    found += [replace(of, state=False, scale=-0.3), replace(of, reverse=True), replace(of, strided=True)]
    found += [replace(of, lengths=lengths), replace(of, lengths=lengths, reverse=True, strided=True, state=False)]
    found += [replace(of, B=2, T=7, shared=axes) for axes in ("BNH", "TKV", "overlap")]
    return found + [replace(of, gate=gate) for gate in ("zero", "gone")] + [replace(of, gate=-30.0, still=True)]


def pooled_cases(variant: str) -> list[Pooled]:
    """Rows of all lengths around a chunk, some skipped."""
    of = Pooled(variant, H=2, K=8, V=12, lengths=(0, 1, 63, 64, 65, 130), slots=(4, 0, -1, 2, 7, 5))
    found = [of, replace(of, dtype=FLOAT64, pool=FLOAT64, slots=(1, 6, 3, 0, -1, 2))]
    found += [replace(of, lengths=(3, 0, 66), slots=None, rows=3, strided=True, layout="gaps")]
    found += [replace(of, lengths=(2, 5), slots=(6, 1), dtype=BFLOAT16, others=FLOAT32, pool=BFLOAT16, layout="heads first")]
    found += [replace(of, G=1), replace(of, lengths=(3, 66), slots=(6, 1), H=4, G=2, strided=True)]
    found += [replace(of, lengths=None, B=3, T=67, slots=(3, -1, 0), scale=0.3), replace(of, lengths=(), slots=(), K=1, V=3)]
    found += [replace(of, gate=gate) for gate in ("spikes", "channels", "weak") if VARIANTS[variant].decay]
    return found + [replace(of, lengths=(1, 2), slots=(3, 6), gate=gate, still=True) for gate in STRONG if VARIANTS[variant].decay]


def interpreted_pooled_cases(variant: str) -> list[Pooled]:
    """The same in sizes that the interpreter takes."""
    of = Pooled(variant, H=2, K=8, V=12, lengths=(0, 1, 5, 17), slots=(4, 0, -1, 2))
    found = [of, replace(of, lengths=None, B=3, T=2, K=20, slots=(4, -1, 0), strided=True, layout="gaps")]
    pieces = replace(of, H=1, lengths=(3, 70, 64), slots=(5, 2, 7), strided=True, layout="heads first")
    found += [replace(of, G=1)]
    found += [replace(pieces, gate=gate) for gate in (("spikes", "channels") if VARIANTS[variant].decay else ("logsigmoid",))]
    of = replace(of, H=1, K=4, V=4, lengths=(1, 2), slots=(3, 6), still=True)
    return found + [replace(of, gate=gate) for gate in STRONG if VARIANTS[variant].decay]


def summary_cases(variant: str) -> list[Summarized]:
    """Both directions in both orders of time, around the lengths of chunks and of blocks of chunks."""
    of, gated = Summarized(variant, B=2, H=2, K=8, V=12, T=70), bool(VARIANTS[variant].decay)
    found = [replace(of, adjoint=adjoint, reverse=reverse) for adjoint in (False, True) for reverse in (False, True)]
    found += [replace(of, T=T, adjoint=adjoint) for T, adjoint in ((0, False), (1, True), (64, False), (65, True))]
    found += [replace(of, T=T, state=False, dtype=dtype) for T, dtype in ((65, FLOAT64), (33, BFLOAT16), (5, FLOAT16))]
    found += [replace(of, B=0), replace(of, H=4, G=2, adjoint=True, scale=0.3), replace(of, strided=True, others=FLOAT64)]
    return found + [replace(of, T=130, gate=gate, adjoint=adjoint) for gate, adjoint in (("mixture", False), ("spikes", True)) if gated]


def interpreted_summary_cases(variant: str) -> list[Summarized]:
    """The same in sizes that the interpreter takes."""
    of = Summarized(variant, B=1, H=2, K=8, V=12, T=70)
    found = [of, replace(of, adjoint=True, scale=0.3), replace(of, reverse=True, G=1, strided=True), replace(of, T=5, state=False)]
    return found + [replace(of, gate="spikes", adjoint=adjoint) for adjoint in (False, True) if VARIANTS[variant].decay]


HELD = [
    *((case, impl) for variant in VARIANTS for case in cases(variant) for impl in NAMES),
    *((case, impl) for variant in VARIANTS for case in long_cases(variant) for impl in LONG),
    *((case, impl) for variant in VARIANTS for impl in TRITON for case in sampled_cases(variant, impl)),
    *((case, impl) for variant in VARIANTS for case in pooled_cases(variant) for impl in NAMES),
    *((case, "triton_recurrent") for variant in VARIANTS for case in interpreted_pooled_cases(variant)),
    *((case, impl) for variant in VARIANTS for case in summary_cases(variant) for impl in ("chunkwise", "reference")),
    *((case, "triton") for variant in VARIANTS for case in interpreted_summary_cases(variant)),
    *((case, impl) for case in attention.CASES for impl in attention.IMPLEMENTATIONS if impl != "triton"),
    *((case, "triton") for case in attention.SMALL_CASES),
]
HELD += [
    *((case, impl) for variant in deltas.VARIANTS for case in delta_cases.cases(variant) for impl in deltas.NAMES),
    *((case, impl) for variant in deltas.VARIANTS for case in delta_cases.long_cases(variant) for impl in LONG if impl in deltas.NAMES),
    *((case, impl) for variant in deltas.VARIANTS for case in delta_cases.sampled_cases(variant) for impl in deltas.TRITON),
    *((case, impl) for variant in deltas.VARIANTS for case in delta_cases.pooled_cases(variant) for impl in deltas.NAMES),
    *((case, impl) for variant in deltas.VARIANTS for case in delta_cases.interpreted_pooled_cases(variant) for impl in deltas.TRITON),
]
HELD_TOO = [
    *((case, impl) for variant in VARIANTS for case in interpreted_cases(variant) for impl in TRITON),
    *((case, "triton") for case in attention.CASES),
    *((case, impl) for variant in deltas.VARIANTS for case in delta_cases.interpreted_cases(variant) for impl in deltas.TRITON),
]
"""Sweeps that take the interpreter minutes."""
SWEEPS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in HELD_TOO if pair not in HELD]


@pytest.mark.sampled("impl")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize(("case", "impl"), [*HELD, *SWEEPS], ids=str)
def test_equals_the_oracle(case, impl):
    """NumPy warns about values in the interpreter that masks discard."""
    check_contract(case, impl)


def test_contract_covers_all_operators_and_implementations():
    """Every operator and variant by every implementation that supports it. ``cuda`` has a test file of its own."""
    held = {(case.operator.name, case.operator.signatures[case.function].about, impl) for case, impl in HELD}
    for trial in trials():
        operator = trial.operator
        for one in operator.family.implementations:
            if one.name != "cuda" and not (operator.in_place and one.advance is None):
                assert {(operator.name, signature.about, one.name) for signature in trial.signatures()} <= held


SMALL = [
    Case("retention", B=1, T=5, H=2, K=4, V=3),
    Case("rwkv6", B=1, T=5, H=2, K=4, V=3),
    Pooled("rwkv6", H=2, K=4, V=3, lengths=(1, 4), slots=(5, 2)),
    attention.Attention(B=1, Tq=5, Tk=5, D=4),
    Summarized("rwkv6", B=1, T=5, H=2, K=4, V=3, adjoint=True),
    deltas.Delta("kda", B=1, T=5, H=2, K=4, V=3),
    deltas.Delta("gated_delta_rule", B=1, T=5, H=2, K=4, V=3, raw=True),
    deltas.Delta("rwkv7", B=1, T=5, H=2, K=4, V=3),
    deltas.PooledDelta("kda", H=2, K=4, V=3, lengths=(1, 4), slots=(5, 2)),
]
"""One small call or two of every operator."""


@pytest.mark.sampled("impl")
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize(("case", "impl"), [(case, impl) for case in SMALL for impl in takers(case)], ids=str)
def test_lazy_tensors_equal_tensors_in_memory(case, impl, kind):
    check_lazy(case, impl, kind, together=impl.startswith("triton"))


class Through(TorchDispatchMode):
    """A mode that changes nothing: calls go through torch's operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.sampled("impl")
@pytest.mark.parametrize("path", ["eager", "operators", "transforms"])
@pytest.mark.parametrize(("case", "impl"), [(case, impl) for case in SMALL if not case.operator.in_place for impl in takers(case)], ids=str)
def test_a_saved_tensor_is_unpacked_once(case, impl, path):
    """As checkpoints of torch require. Hooks may load it from elsewhere."""
    packed, unpacked, tensors = [], Counter(), case.tensors()
    given = {name: x.requires_grad_() for name, x in tensors.items() if x is not None and x.is_floating_point()}

    def results(*leaves):
        return tuple(case.call(tensors | dict(zip(given, leaves)), impl))

    def pack(x):
        packed.append(x)
        return len(packed) - 1

    def unpack(place):
        unpacked[place] += 1
        return packed[place]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), Through() if path == "operators" else nullcontext():
        if path == "transforms":
            found = torch.func.vmap(results)(*[x[None] for x in given.values()])
        else:
            found = results(*given.values())
        torch.autograd.grad(found, list(given.values()), [d.expand_as(y) for d, y in zip(case.upstream(), found)], allow_unused=True)
    assert set(unpacked.values()) == {1}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("impl", takers(SMALL[2]))
def test_lazy_pools_are_refused(impl, kind):
    tensors = SMALL[2].tensors()
    with pytest.raises(ps.RangeError, match="state must be memory that can be written, got a"):
        SMALL[2].call(tensors | {"state": LAZY[kind][0](tensors["state"])}, impl)


@pytest.mark.parametrize("elements", [1, 10_000], ids=["one chunk", "three chunks"])
@pytest.mark.parametrize("options", [{"T": 300}, {"T": 90, "B": 5, "state": False}, {"lengths": (*LENGTHS, 300), "reverse": True}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_of_chunks_equal_the_oracle(variant, options, elements, monkeypatch):
    """``chunkwise`` cuts long sequences into blocks; with smaller blocks, short ones too."""
    monkeypatch.setattr(chunks, "BLOCK", elements)
    for dtype in (FLOAT32, FLOAT64):
        check_contract(replace(Case(variant, dtype=dtype), **options), "chunkwise")


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize("impl", [*NAMES, *TRITON])
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_a_decay_of_minus_infinity_equals_minus_ten_thousand(variant, impl):
    """Both are a factor of 0, so the results have the same bits."""
    case = Case(variant, T=70, gate="-inf") if impl in NAMES else Case(variant, B=1, H=1, T=33, gate="-inf")
    tensors = draw(case)
    finite = tensors | {"g": tensors["g"].clamp(min=-1e4)}
    assert tensors["g"].isinf().any()
    for found, wanted in zip(call(case, tensors, impl), call(case, finite, impl)):
        assert found.isfinite().all()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_decay_gradients_near_underflow(variant, impl):
    check_near_underflow(Case(variant, T=5, B=1, H=1), partial(measured, impl=impl))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@pytest.mark.parametrize(("impl", "K"), [*((impl, 16) for impl in (*NAMES, *TRITON)), *((impl, 260) for impl in TRITON)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_have_the_dtypes_of_their_inputs(variant, impl, K):
    """Before autograd, which would cast them. Compiled graphs take the dtypes as declared."""
    case = Case(variant, B=1, T=3, H=1, K=K, V=5, dtype=FLOAT16)
    tensors = draw(case)
    problem = problem_of(case, tensors)
    found = case.operator.gradients(problem, impl, Upstream(case.upstream()))
    given = [x for x, gradient in zip(problem.tensors, case.operator.gradient) if gradient]
    assert [None if x is None else x.dtype for x in found] == [None if x is None else x.dtype for x in given]


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dtypes_of_results(variant, impl):
    """Output in v's dtype, final state in float32, each gradient in its input's dtype; no state unless asked for."""
    case = Case(variant, dtype=BFLOAT16, others=FLOAT32, T=3)
    found = measured(case, impl)
    assert {name: x.dtype for name, x in found.items() if x.dtype != FLOAT32} == dict.fromkeys(("output", "dq", "dk", "dv"), BFLOAT16)
    assert call(case, draw(case), impl, output_final_state=False).final_state is None
