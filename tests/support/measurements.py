"""Benchmark candidates that are wrong or raise, and measurements with fake times."""

import torch

from penstock.bench.candidates import Candidate
from penstock.bench.loop import token_loop
from penstock.bench.measure import Measurement, Timing
from penstock.tokens.shape import Shape
from penstock.verify import oracle
from penstock.verify.inputs import Inputs

SMALL = Shape(2, 9, 2, 5, 7)


def wrong(mode: str) -> Candidate:
    """A candidate with a relative error of 1e-4 in the checked result of a mode."""

    def forward(x: Inputs) -> torch.Tensor:
        output = x.run("chunkwise")
        return output + 1e-4 * output.detach().abs().max() if mode == "fwd" else output * (1 + 1e-4)

    def step(x: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, state = token_loop(x, state)
        return output, state * (1 + 1e-4)

    return Candidate("wrong", forward, step, oracle.budget)


def refusing(x: Inputs) -> torch.Tensor:
    raise RuntimeError("no kernel for this\nand much more")


def measured(variant, shape, mode="fwd", *names, untimed=(), gpu=None):
    """A measurement of these candidates; the first takes 3 ms, each later one 1 ms less."""
    timings = tuple(Timing(name, 3.0 - n, (2.0, 4.0), 9, 1e-6, 1, gpu=gpu) for n, name in enumerate(names))
    copy = Timing("copy", 1.0, (1.0, 1.0), 9, None, 1, gpu=gpu)
    return Measurement(variant, "a", shape, mode, "float32", "cpu", 9, 100, copy, timings, untimed, "loop")
