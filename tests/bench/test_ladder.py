"""The CUDA ladder without a GPU: its kernels are emulated and compiled."""

import pytest
import torch

import penstock as ps
from penstock.bench import ladder
from penstock.gpu import nvrtc
from penstock.tokens.shape import Shape
from penstock.verify.inputs import inputs
from penstock.verify.oracle import error, exact_forward

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_equals_the_oracle(name, emulated_cuda):
    """The shape leaves some threads of the last block without work."""
    x = inputs("rwkv6", Shape(3, 20, 1, 32, 32), FLOAT32, "cpu")
    found = ladder.Rung(name, 32).forward(x, x.g.exp())
    assert error(found, exact_forward(x)[0]) < 1e-6


@pytest.mark.parametrize("name", ladder.RUNGS)
def test_every_rung_compiles(name):
    pytest.importorskip("cuda.core")
    nvrtc.compiled(ladder.Rung(name, 64), "sm_90")


def test_rungs_are_timed_on_a_gpu_only():
    x = inputs("rwkv6", Shape(1, 2, 1, 32, 32), FLOAT32, "cpu")
    with pytest.raises(ps.ImplementationRefused, match=r"^bench: rung-wide cannot be timed here: .+\.$"):
        ladder.rung("rung-wide", x, "fwd")
    with pytest.raises(ps.InvalidArgument) as broken:
        ladder.rung("rung-wide", inputs("gla", Shape(1, 2, 1, 6, 4), BFLOAT16, "cpu"), "decode")
    assert [line.partition(",")[0] for line in str(broken.value).splitlines()] == [
        "bench: rung-wide: variant must be rwkv6",
        "bench: rung-wide: mode must be fwd",
        "bench: rung-wide: dtype must be float32",
        "bench: rung-wide: shape must be one of equal K and V",
    ]
