"""Benchmark cases and suites, and the floor: the bytes that a call moves."""

import pytest
import torch

from penstock.bench.calls import moved_bytes
from penstock.bench.candidates import MODES
from penstock.bench.cases import CASES, MODELS, case_named, default_cases
from penstock.bench.measure import Measurement, Timing
from penstock.bench.suites import SUITES, suite_named
from penstock.call.families import variants
from penstock.tokens.distributions import GATES
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
    assert {case.shape[:2] for case in suite_named("gpu-decode").cases} == {(1, 1), (256, 1), (1024, 1)}
    assert [case.shape.T for case in suite_named("lengths").cases] == [*(2048 * 2**n for n in range(7)), 163840]
    assert case_named("gla-8x2048x4x256x512").shape == Shape(8, 2048, 4, 256, 512)


def test_cases_name_the_distribution_of_their_decays():
    for case in (case for suite in SUITES for case in suite.cases):
        copy = Timing("copy", 1.0, (1.0, 1.0), 9, None, 1)
        row = Measurement(case.variant, case.name, case.shape, "fwd", "float32", "cpu", 9, 100, copy, ())
        assert row.gates == case.gates
        assert case.gates in ("", *GATES)
    assert {case.gates for case in suite_named("gates").cases} == set(GATES) - {"soft"}


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
