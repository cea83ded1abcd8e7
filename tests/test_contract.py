"""Every implementation of every variant against the float64 oracle: values, final states and all gradients."""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import NAMES, SHARED, Case, arithmetic, call, check_against, distance, draw, measured, oracle, problem_of

import penstock as ps
from penstock.dispatch import IMPLEMENTATIONS
from penstock.variants import VARIANTS

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LENGTHS = (0, 5, 64, 0, 1, 81, 0)
LONG = ("cpu", "chunkwise")
"""Implementations that are also held to the oracle on long sequences; the others are quadratic or as slow as it."""


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
    found += [replace(of, T=5, gate=gate, still=True) for gate in (-0.3, -3.0, -30.0) if gated]
    found += [replace(of, T=130, gate=gate, dtype=dtype) for gate in ("zero", "gone", "mixture") for dtype in (FLOAT32, FLOAT64) if gated]
    found += [replace(of, T=70, gate="mixture", reverse=True)] * gated
    found += [replace(of, T=70, gate="mixture", dtype=FLOAT16), replace(of, T=70, gate="mixture", dtype=BFLOAT16)] * gated
    return found


def long_cases(variant: str) -> list[Case]:
    """Thousands of tokens: rounding errors of the decays must not add up."""
    of = Case(variant, B=1, H=3, K=16, V=8, T=4096)
    if not VARIANTS[variant].decay:
        return [of]
    return [*(replace(of, gate=gate) for gate in ("drift", "mixture", "weak")), replace(of, gate="weak", still=True)]


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("case", [case for variant in VARIANTS for case in cases(variant)], ids=str)
def test_equals_the_oracle(case, impl):
    """Forward and backward, or a refusal that is heard."""
    check_contract(case, impl)


@pytest.mark.parametrize("impl", LONG)
@pytest.mark.parametrize("case", [case for variant in VARIANTS for case in long_cases(variant)], ids=str)
def test_long_sequences_equal_the_oracle(case, impl):
    check_contract(case, impl)


def check_contract(case, impl):
    implementation = next(one for one in IMPLEMENTATIONS if one.name == impl)
    problem = problem_of(case, draw(case))
    reason = implementation.available() or implementation.refuses(problem, "forward")
    if reason is not None:
        with pytest.raises(ps.ImplementationRefused, match=re.escape(reason)):
            measured(case, impl)
        return
    check_against(measured(case, impl), oracle(case), case.dtype)


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_a_decay_of_minus_infinity_is_one_of_minus_ten_thousand(variant, impl):
    """Both are a factor of 0; with what they leave standing, bit for bit the same."""
    case = Case(variant, T=70, gate="-inf")
    tensors = draw(case)
    finite = tensors | {"g": tensors["g"].clamp(min=-1e4)}
    assert tensors["g"].isinf().any()
    for found, wanted in zip(call(case, tensors, impl), call(case, finite, impl)):
        assert found.isfinite().all()
        assert torch.equal(found, wanted)


NEAR_UNDERFLOW = (-80.0, -86.0, -87.0, -87.3, -88.0, -90.0, -103.0, -104.0)
"""Log decays whose exponentials are among float32's smallest numbers: exp(-87.33) is the last normal one."""


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row.decay])
def test_decay_gradients_near_underflow(variant, impl):
    check_near_underflow(Case(variant, T=5, B=1, H=1), partial(measured, impl=impl))


def check_near_underflow(case, results):
    """dg = exp(g) rowsum(S o dS), with dS large enough to make it visible. Factors below the smallest normal number may be flushed to 0."""
    for g in NEAR_UNDERFLOW:
        found, wanted = (of(replace(case, gate=g, upstream=1e30)) for of in (results, oracle))
        off, size = distance(found["dg"], wanted["dg"]), wanted["dg"].size
        flushed = torch.finfo(FLOAT32).smallest_normal / math.exp(g) * size if math.exp(g) < torch.finfo(FLOAT32).smallest_normal else 0
        assert off <= arithmetic(case.dtype) * size + flushed, g


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dtypes_of_results(variant, impl):
    """Output in v's dtype, final state in float32, each gradient in its input's dtype; no state unless asked for."""
    case = Case(variant, dtype=BFLOAT16, others=FLOAT32, T=3)
    found = measured(case, impl)
    assert {name: x.dtype for name, x in found.items() if x.dtype != FLOAT32} == dict.fromkeys(("output", "dq", "dk", "dv"), BFLOAT16)
    assert call(case, draw(case), impl, output_final_state=False).final_state is None
