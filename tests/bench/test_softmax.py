"""Softmax attention beside torch's operator."""

import pytest
import torch

from penstock import RangeError
from penstock.bench import softmax
from penstock.bench.cases import Case
from penstock.tokens.shape import Shape


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_softmax_attention_is_measured_beside_sdpa(mode):
    case = Case("small", "softmax_attention", Shape(2, 20, 3, 8, 8), "")
    found = softmax.measure(case, mode, torch.float32, "cpu", 0.002)
    assert [one.candidate for one in found.timings] == ["sdpa", "penstock (auto)"]
    assert found.baseline is found.timings[0]
    assert set(found.timings[1].results) == {"output"} | {f"gradient of {name}" for name in "qkv" if mode == "fwdbwd"}
    assert all(0 < one.error < 1e-5 for one in found.timings)


def test_wrong_softmax_attention_is_not_timed(monkeypatch):
    monkeypatch.setattr(softmax, "softmax_attention", lambda q, k, v, impl: 1.001 * v)
    found = softmax.measure(Case("small", "softmax_attention", Shape(1, 20, 1, 8, 8), ""), "fwd", torch.float32, "cpu", 0.002)
    assert [one.candidate for one in found.timings] == ["sdpa"]
    assert found.untimed[0].reason.startswith("wrong: its output is")
    assert found.untimed[0].fault


def test_softmax_attention_has_no_decode_mode():
    with pytest.raises(RangeError, match="mode must be fwd or fwdbwd for softmax_attention, got 'decode'"):
        softmax.measure(Case("small", "softmax_attention", Shape(1, 2, 1, 8, 8), ""), "decode", torch.float32, "cpu", 0.002)
