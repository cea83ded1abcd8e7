"""Every gate is exact, and takes the same time.

RWKV-6 and Kimi delta attention run with log decays -exp(x + mu), from nearly none (mu = -12) to total forgetting. Each output is compared
with the float64 token loop, and each call is timed, on one thread. A kernel that divides by products of decays overflows, or loses
digits, towards the right of the picture.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import torch

import penstock as ps

matplotlib.use("agg")
from matplotlib import pyplot

STRENGTHS = [-12.0, -8.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0]


def measured(variant: str, mu: float, length: int) -> tuple[float, float]:
    """The relative error of the output, and milliseconds of CPU time of the fastest of 50 calls."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, x = (torch.randn(1, length, 4, 64, generator=generator) for _ in range(4))
    k, g = k / k.norm(dim=-1, keepdim=True), -torch.exp(x + mu)
    if variant == "rwkv6":
        tensors = (q, k, v, g, torch.randn(4, 64, generator=generator))
    else:
        tensors = (q, k, v, g, torch.rand(1, length, 4, generator=generator))
    function = getattr(ps, variant)
    exact = function(*(one.double() for one in tensors), impl="reference").output
    seconds = []
    for _ in range(50):
        begun = time.thread_time()
        output = function(*tensors).output
        seconds.append(time.thread_time() - begun)
    return float((output - exact).norm() / exact.norm()), 1000 * min(seconds)


def main() -> dict[str, list[tuple[float, float]]]:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("gates.png"))
    parser.add_argument("--length", type=int, default=512, help="tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {variant: [measured(variant, mu, options.length) for mu in STRENGTHS] for variant in ("rwkv6", "kda")}
    figure, (errors, times) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for variant, rows in found.items():
        for mu, (error, milliseconds) in zip(STRENGTHS, rows):
            print(f"{variant:6} mu = {mu:5.1f}   error {error:.1e}   {milliseconds:6.2f} ms")
        errors.semilogy(STRENGTHS, [error for error, _ in rows], marker="o", label=variant)
        times.plot(STRENGTHS, [milliseconds for _, milliseconds in rows], marker="o", label=variant)
    errors.set(title="relative error of float32 outputs", xlabel="mu: log decays -exp(x + mu)", ylim=(1e-8, 1e-4))
    times.set(title="milliseconds of a call, one thread", xlabel="mu", ylim=(0, None))
    errors.axhline(2e-6, color="grey", linestyle="--", label="bound")
    errors.legend()
    figure.savefig(options.plot, dpi=110)
    return found


if __name__ == "__main__":
    main()
