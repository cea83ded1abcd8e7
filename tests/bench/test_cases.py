"""Benchmark cases and suites, and the floor: the bytes that a call moves."""

import math

import pytest
import torch

from penstock.bench.calls import moved_bytes
from penstock.bench.candidates import MODES
from penstock.bench.cases import CASES, MODELS, case_named, default_cases
from penstock.bench.measure import Measurement, Timing
from penstock.bench.suites import SUITES, suite_named
from penstock.call.families import variants
from penstock.tokens.distributions import GATES, STRENGTHS
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs


def test_every_variant_has_a_model_and_decode_batches_from_1_to_256():
    assert {case.variant for case in MODELS} == set(variants(drawn=True))
    assert len({case.name for case in CASES}) == len(CASES)
    for variant in variants(drawn=True):
        batches = [case.shape.B for case in default_cases(variant, decode=True)]
        assert batches[0] == 1
        assert batches[-1] == 256


def test_suites_consist_of_named_cases():
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    for suite in SUITES:
        assert all(case_named(case.name).shape == case.shape for case in suite.cases)
        assert set(suite.modes) <= set(MODES)
    rows = {(case.variant, case.shape.text) for case in suite_named("gpu-training").cases}
    sizes = ["8,2048,32,64", "1,65536,32,64", "4,2048,16,128", "1,8192,96,128", "2,16384,16,128", "1,2048,32,64", "1,54,32,64"]
    assert {(variant, text) for variant in ("gla", "rwkv6") for text in sizes} < rows
    assert {case.shape[:2] for case in suite_named("gpu-decode").cases} == {(1, 1), (128, 1), (256, 1), (1024, 1)}
    assert [case.shape.T for case in suite_named("lengths").cases] == [*(2048 * 2**n for n in range(7)), 163840]
    assert case_named("gla-8x2048x4x256x512").shape == Shape(8, 2048, 4, 256, 512)


def test_cases_name_the_distribution_of_their_decays():
    for case in (case for suite in SUITES for case in suite.cases):
        copy = Timing("copy", 1.0, (1.0, 1.0), 9, None, 1)
        row = Measurement(case.variant, case.name, case.shape, "fwd", "float32", "cpu", 9, 100, copy, ())
        assert row.gates == case.gates
        assert case.gates in ("", *GATES, *STRENGTHS)
    assert {case.gates for case in suite_named("gates").cases} == set(GATES) - {"soft"}


def test_shapes_of_the_delta_rule_at_every_strength():
    rows = {(case.variant, case.shape, case.groups): [] for case in suite_named("delta-gates").cases}
    for case in suite_named("delta-gates").cases:
        rows[case.variant, case.shape, case.groups].append(case.gates)
    assert {(variant, *shape[:4], groups) for variant, shape, groups in rows} == {
        *(("kda", 1, T, H, 128, None) for T, H in ((8192, 64), (4096, 16), (2048, 12))),
        *(("gated_delta_rule", *sizes, 128, 16) for sizes in ((4, 8192, 64), (1, 32768, 32))),
        *(("rwkv7", *sizes, 32, 64, None) for sizes in ((8, 2048), (1, 8192))),
    }
    for (variant, *_), strengths in rows.items():
        assert strengths == [
            one for one in STRENGTHS if (one in ("tiny", "slow", "bounded", "bound") if variant == "rwkv7" else one != "bound")
        ]
    cpu = {(case.variant, case.shape[:4]) for case in suite_named("delta-gates-cpu").cases}
    assert {("rwkv7", (1, 1024, 32, 64)), ("kda", (1, 1024, 16, 128))} < cpu


def test_decode_cases_of_the_delta_rule_have_slots():
    cases = [case for case in suite_named("gpu-decode").cases if case.slots]
    assert [(case.variant, *case.shape) for case in cases] == [
        (variant, batch, 1, 32, K, K) for variant, K in (("kda", 128), ("rwkv7", 64)) for batch in (1, 128, 1024)
    ]


def test_cases_may_share_heads():
    case = case_named("gated_delta_rule-slow-4x8192x16/64x128")
    assert (case.shape, case.groups, case.gates) == (Shape(4, 8192, 64, 128, 128), 16, "slow")
    x = inputs(case.variant, case.shape._replace(B=1, T=3), groups=case.groups)
    assert x.q.shape == x.k.shape == (1, 3, 16, 128)
    assert x.v.shape == (1, 3, 64, 128)


@pytest.mark.parametrize("variant", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_strengths_of_decays(strength, variant):
    g = inputs(variant, Shape(2, 500, 40, 16, 16), torch.float64, gates=strength).g
    assert bool((g <= 0).all())
    known = {"zero": (0, 0), "bounded": (-5, 0), "bound": (-5, -3.5), "channels": (-100, 0), "spikes": (-2661, 0), "resets": (-math.inf, 0)}
    low, high = known.get(strength, (-math.inf, 0))
    assert low <= g.min().item() <= g.max().item() <= high
    if strength == "tiny":
        assert (g / -1e-8).sub(1).abs().max().item() < 0.1
    medians = {"slow": -0.0433, "fast": -6.93, "bounded": -2.5, "mu2": -7.39}  # logsigmoid(0) = -0.693, e^2 = 7.39
    if strength in medians:
        assert g.median().item() == pytest.approx(medians[strength], rel=0.02)
    if strength == "channels":
        strong = (g == -100).reshape(1000, -1)
        assert torch.equal(strong.any(0), strong.all(0))
        assert strong[0].sum().item() == strong.shape[1] // 20
    if strength in ("spikes", "resets"):
        strong = g == low
        assert 0.008 < strong.double().mean().item() < 0.012
        if g.dim() == 4:
            assert torch.equal(strong.any(3), strong.all(3)) is (strength == "resets")


@pytest.mark.parametrize("strength", ["tiny", "slow", "bounded", "bound"])
def test_strengths_of_rwkv7_are_between_its_bounds(strength):
    g = inputs("rwkv7", Shape(2, 500, 4, 16, 16), torch.float64, gates=strength).g
    assert -math.exp(-0.5) <= g.min().item() <= g.max().item() < 0


@pytest.mark.parametrize("gates", GATES)
def test_distributions_of_decays(gates):
    g = inputs("rwkv6", Shape(2, 500, 4, 64, 4), torch.float64, gates=gates).g
    assert bool((g <= 0).all())
    assert bool(g.isfinite().all())
    if gates.startswith("mu"):
        logs = (-g).log()
        assert logs.mean().item() == pytest.approx(int(gates[2:]), abs=0.02)
        assert logs.std().item() == pytest.approx(1, abs=0.02)
    if gates == "forgetting":
        weak = inputs("rwkv6", Shape(2, 500, 4, 64, 4), torch.float64, gates="initial").g
        stronger = (g / weak).amin((0, 1)) > 400  # e^6 is 403
        assert 0 < stronger.sum().item() < 0.06 * 256


@pytest.mark.parametrize(
    ("variant", "dtype", "mode", "expected"),
    [
        ("gla", torch.bfloat16, "fwd", 12 * 1000),  # 2 for each of q, k, v, o and 4 for g
        ("gla", torch.bfloat16, "fwdbwd", (12 + 22) * 1000),  # again these, and 2 for dq, dk, dv and 4 for dg
        ("linear_attention", torch.bfloat16, "fwd", 8 * 1000),
        ("linear_attention", torch.float32, "fwdbwd", (16 + 16 + 12) * 1000),
        ("retention", torch.float32, "fwd", 16 * 1000 + 4 * 2),  # g [H]
        ("simple_gla", torch.float32, "fwd", 16 * 1000 + 4 * 50),  # g [B, T, H]
        ("rwkv5", torch.float32, "fwd", 16 * 1000 + 4 * 2 * 40),  # w and u [H, K]
        ("rwkv6", torch.float64, "fwd", 40 * 1000 + 8 * 40),  # u [H, K]
        ("rwkv6", torch.float32, "decode", 2 * 4 * 2 * 20 * 20),
        ("rwkv6", torch.bfloat16, "decode", 2 * 4 * 2 * 20 * 20),  # states are float32
    ],
)
def test_floor_counts_every_input_and_result_once(variant, dtype, mode, expected):
    shape = Shape(1, 25, 2, 20, 20)  # 1000 elements
    assert moved_bytes(inputs(variant, shape, dtype), mode) == expected


def test_floor_of_the_published_shape():
    x = inputs("gla", Shape(1, 2048, 4, 64, 64), torch.bfloat16)
    assert moved_bytes(x, "fwd") / 4.24e12 * 8 * 8 == pytest.approx(0.095e-3, rel=0.01)  # 8 sequences of 32 heads, at 4.24 TB/s
