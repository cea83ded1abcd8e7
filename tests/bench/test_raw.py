"""The candidate with raw decays: the same results as those of log decays, by another call."""

import pytest
import torch

from penstock.bench import raw
from penstock.bench.measure import measure
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs

SHAPES = {"kda": Shape(2, 70, 2, 16, 24), "rwkv7": Shape(2, 70, 2, 16, 16)}


def drawn(variant, gates, dtype=torch.float32):
    return inputs(variant, SHAPES[variant], dtype, gates=gates)


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
@pytest.mark.parametrize("gates", ["tiny", "slow", "bounded", "bound"])
@pytest.mark.parametrize("variant", raw.BOUNDS)
def test_results_and_gradients_are_those_of_log_decays(variant, gates, mode):
    x = drawn(variant, gates)
    (timing,) = measure("a", x, mode, [raw.own("raw", x, mode)], seconds=0.001).timings
    assert timing.candidate.startswith("raw (")
    assert timing.error < 1e-5


REFUSED = [("kda", "fast", "fwd"), ("kda", "resets", "fwdbwd"), ("kda", "zero", "fwdbwd"), ("rwkv7", "slow", "decode")]


@pytest.mark.parametrize(("variant", "gates", "mode"), REFUSED)
def test_calls_without_raw_decays_are_refusals(variant, gates, mode):
    x = inputs(variant, SHAPES[variant]._replace(T=1) if mode == "decode" else SHAPES[variant], gates=gates)
    (untimed,) = measure("a", x, mode, [raw.own("raw", x, mode)], seconds=0.001, keep_going=True).untimed
    reason = {
        "decode": "decode steps are those of auto, which have no levels",
        "zero": "its log decays are -5 sigmoid(x), and log decays of 0 have no gradient by x",
    }
    expected = reason.get(mode) or reason.get(gates) or "its log decays are -5 sigmoid(x) of bfloat16 x, and these are not"
    assert untimed.reason == f"refuses: {expected}"
    assert not untimed.fault


def test_other_names_are_implementations():
    x = drawn("rwkv7", "slow")
    assert raw.own("chunkwise", x, "fwd").name == "chunkwise"
    assert raw.own("auto", x, "fwd").name.startswith("auto (")
    assert (raw.names("rwkv7"), raw.names("gated_delta_rule")) == (("raw",), ())
