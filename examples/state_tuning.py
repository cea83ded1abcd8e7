"""State tuning and steering: two ways to change what a model says without its weights.

A small RWKV-7 learns sentences in two moods. Then its initial state alone is trained towards one of them, and a direction between the two
moods is added to the output of a layer. The engine serves the model and the tuned state in one batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from penstock.engine import Engine, SamplingParams
from penstock.models import CausalLM, rwkv7
from penstock.models.tokenizers import Bytes

matplotlib.use("agg")
from matplotlib import pyplot

MOODS = {"good": ("joy", "sun", "song"), "bad": ("rain", "woe", "dust")}
PROMPT = "The day was "


class Sentences:
    """The day was MOOD: word word word."""

    vocab_size = 256

    def __init__(self, *moods: str) -> None:
        self.moods = moods

    def draw(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random sentences of the moods."""
        numbers = torch.randint(1000, (count, 4), generator=generator).tolist()
        rows = []
        for mood, *words in numbers:
            some = MOODS[self.moods[mood % len(self.moods)]]
            rows.append(list((PROMPT + " ".join(some[word % 3] for word in words) + "." + " " * 8).encode())[:28])
        tokens = torch.tensor(rows)
        return tokens[:, :-1], tokens[:, 1:]


def good_share(texts: list[str]) -> float:
    """The share of good words among the words of the moods."""
    counts = {mood: sum(text.count(word) for text in texts for word in words) for mood, words in MOODS.items()}
    return counts["good"] / max(sum(counts.values()), 1)


def steered(model: CausalLM, direction: Tensor, strength: float) -> float:
    """The share of good words while a hook adds to the output of layer 0."""

    def add(module: Any, given: Any, output: Any) -> Any:
        return output[0] + strength * direction, *output[1:]

    hook = model.layers[0].register_forward_hook(add)
    torch.manual_seed(0)
    tokens = model.generate(torch.tensor([list(PROMPT.encode())] * 64), count=15)
    hook.remove()
    return good_share([bytes(row).decode("utf-8", "replace") for row in tokens.tolist()])


def outputs_of(model: CausalLM) -> Callable[[str], Tensor]:
    """The mean output of layer 0 over sentences of a mood."""

    def mean(mood: str) -> Tensor:
        seen: list[Tensor] = []
        hook = model.layers[0].register_forward_hook(lambda module, given, output: seen.append(output[0].detach()))
        with torch.no_grad():
            model(Sentences(mood).draw(64, torch.Generator().manual_seed(0))[0])
        hook.remove()
        return seen[0][:, len(PROMPT) :].mean((0, 1))

    return mean


def fit(model: CausalLM, task: Sentences, steps: int, rate: float) -> list[float]:
    """Train the parameters that need gradients on batches of 32: the losses."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens, labels = task.draw(32, generator)
        loss = model.loss(tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> dict[str, Any]:
    """Train, serve, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("state_tuning.png"))
    parser.add_argument("--steps", type=int, default=120, help="of training; state tuning has a third of them")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other
    torch.manual_seed(0)
    base = CausalLM(rwkv7(vocab_size=256, hidden_size=32, num_layers=2, head_size=16))
    fit(base, Sentences("good", "bad"), options.steps, 5e-3)
    tuned = CausalLM(replace(base.config, mixer=replace(base.config.mixer, tuned_state=True)))
    tuned.load_state_dict(base.state_dict(), strict=False)
    for name, parameter in tuned.named_parameters():
        parameter.requires_grad_(name.endswith("time_state"))
    fit(tuned, Sentences("good"), options.steps // 3, 1e-1)
    engine = Engine(base.eval(), Bytes(), slots=32, states={"good": tuned.initial_state(1)})
    sampling = [SamplingParams(max_tokens=15, seed=seed) for seed in range(64)]
    shares = {}
    for name in (None, "good"):
        texts = [one.text for one in engine.generate([PROMPT] * 64, sampling, tuning=name)]
        shares[name or "base"] = good_share(texts)
        print(f"{name or 'base'}: {shares[name or 'base']:.0%} good words, such as {PROMPT + texts[0]!r}")
    engine.close()
    mean = outputs_of(base)
    direction, strengths = mean("good") - mean("bad"), [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    curve = [steered(base, direction, strength) for strength in strengths]
    print("steered by", *(f"{strength:g}: {share:.0%}" for strength, share in zip(strengths, curve)))
    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(1, 2))
    bars.bar(["zeros", "tuned"], [100 * one for one in shares.values()], color=["tab:blue", "tab:orange"])
    bars.set(title="good words, by initial state", ylabel="%", ylim=(0, 100))
    lines.plot(strengths, [100 * one for one in curve], marker="o")
    lines.set(title="good words, steered in layer 0", xlabel="times the direction from bad to good", ylim=(0, 100))
    figure.savefig(options.plot, dpi=110)
    return {"shares": shares, "curve": curve}


if __name__ == "__main__":
    main()
