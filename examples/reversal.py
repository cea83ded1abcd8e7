"""RWKV-7 learns to reverse digits.

A number, a separator, then its digits from the last to the first. A recurrent model has read all digits before it returns the first one,
so its state must hold them in order. RWKV-7 and GLA of the same size learn it for as many steps, from new numbers at every step.
`penstock eval --task reversal` is the same as a command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch

from penstock.models import CausalLM
from penstock.training.reversal import Reversal
from penstock.training.synthetic import evaluate, model_config

matplotlib.use("agg")
from matplotlib import pyplot

POINTS = 10
"""Evaluations of a run."""


def learned(model: CausalLM, task: Reversal, steps: int) -> list[float]:
    """Train on new numbers at every step: the shares of right digits of other numbers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.1)
    generator, held, shares = torch.Generator().manual_seed(0), task.draw(256, torch.Generator().manual_seed(1)), []
    for step in range(1, steps + 1):
        tokens, labels = task.draw(64, generator)
        loss = model.loss(tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step * POINTS // steps > (step - 1) * POINTS // steps:
            shares.append(evaluate(model, *held))
    return shares


def main() -> dict[str, list[float]]:
    """Train, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("reversal.png"))
    parser.add_argument("--digits", type=int, default=4, help="digits of the longest number")
    parser.add_argument("--steps", type=int, default=250, help="of each model")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other
    task, found = Reversal(options.digits), {}
    for architecture in ("rwkv7", "gla"):
        torch.manual_seed(0)
        model = CausalLM(model_config(architecture, task, hidden_size=32, num_layers=2))
        found[architecture] = learned(model, task, options.steps)
        print(f"{architecture}: {found[architecture][-1]:.1%} of the digits of new numbers after {options.steps} steps")
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for architecture, shares in found.items():
        steps = [options.steps * n // POINTS for n in range(1, POINTS + 1)]
        axes.plot(steps, [100 * one for one in shares], marker=".", label=architecture)
    axes.set(
        title=f"digits of new numbers that are right, up to {options.digits} digits",
        xlabel="steps of 64 numbers",
        ylabel="%",
        ylim=(0, 101),
    )
    axes.legend()
    figure.savefig(options.plot, dpi=110)
    return found


if __name__ == "__main__":
    main()
