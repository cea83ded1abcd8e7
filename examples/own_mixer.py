"""A token mixer of your own, in a language model, beside linear attention.

HGRN2 is not in `penstock.layers`. It is gated linear attention whose keys are 1 - exp(g): a configuration and a module of 20 lines. The
model around it trains, takes packed sequences, decodes in place, and runs in the engine, because the recurrence of the mixer does.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from torch import Tensor, nn

from penstock.demo.text import python_topics
from penstock.engine import Engine, SamplingParams
from penstock.layers import LinearAttentionConfig, Mixer, MixerConfig, Sequences, SwiGLUConfig, register
from penstock.models import CausalLM, Config
from penstock.models.tokenizers import Bytes

matplotlib.use("agg")
from matplotlib import pyplot


@register
@dataclass(frozen=True)
class HGRN2Config(MixerConfig):
    """HGRN2 (Qin et al. 2024, arXiv 2404.07904)."""

    kind = "hgrn2_example"
    num_heads: int

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> HGRN2:
        """The module."""
        return HGRN2(self, hidden_size)


class HGRN2State(NamedTuple):
    """A state of each sequence."""

    kv: Tensor
    """[N,H,K,K]"""


class HGRN2(Mixer):
    """o = q S, S = diag(exp(g)) S + (1 - exp(g))^T v, g = logsigmoid(f)."""

    def __init__(self, config: HGRN2Config, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.config = config
        self.inputs = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.norm, self.output = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> HGRN2State:
        """Zeros, in float32."""
        size = self.hidden_size // self.config.num_heads
        return HGRN2State(like.new_zeros(count, self.config.num_heads, size, size, dtype=torch.float32))

    def mix(self, x: Tensor, state: HGRN2State, sequences: Sequences) -> tuple[Tensor, HGRN2State]:
        """The output, and the states after the tokens."""
        q, f, v = (one.unflatten(-1, (self.config.num_heads, -1)) for one in self.inputs(x).chunk(3, -1))
        g = nn.functional.logsigmoid(f.float())
        output, kv = sequences.recur("gla", nn.functional.silu(q), -torch.expm1(g).to(q.dtype), v, g, state=state.kv)
        return self.output(self.norm(output.flatten(-2))), HGRN2State(kv)


class Text:
    """Windows of the language reference of Python; the label of a byte is the next one."""

    vocab_size = 256

    def __init__(self, length: int) -> None:
        self.bytes, self.length = torch.frombuffer(bytearray(python_topics()), dtype=torch.uint8).long(), length

    def draw(self, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Random windows."""
        begin = torch.randint(len(self.bytes) - self.length, (count, 1), generator=generator)
        rows = self.bytes[begin + torch.arange(self.length + 1)]
        return rows[:, :-1], rows[:, 1:]


def fit(model: CausalLM, task: Text, steps: int) -> list[float]:
    """Train the parameters that need gradients on batches of 32: the losses."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens, labels = task.draw(32, generator)
        loss = model.loss(tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> dict[str, list[float]]:
    """Train, print, generate and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("own_mixer.png"))
    parser.add_argument("--steps", type=int, default=100, help="of each model")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other
    found = {}
    for name, mixer in (("linear attention", LinearAttentionConfig(num_heads=2)), ("HGRN2", HGRN2Config(num_heads=2))):
        torch.manual_seed(0)
        model = CausalLM(Config(vocab_size=256, hidden_size=64, num_layers=2, mixer=mixer, channel=SwiGLUConfig(128)))
        found[name] = fit(model, Text(64), options.steps)
        print(f"{name}: {sum(found[name][-10:]) / 10:.3f} nats per byte in the last ten steps")
    engine = Engine(model.eval(), Bytes(), slots=4)
    print("the engine continues:", engine.generate("The statement ", SamplingParams(max_tokens=40, temperature=0))[0].text)
    engine.close()
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for name, losses in found.items():
        axes.plot(losses, label=name)
    axes.set(title="loss on the language reference of Python", xlabel="steps of 32 windows of 64 bytes", ylabel="nats per byte")
    axes.legend()
    figure.savefig(options.plot, dpi=110)
    return found


if __name__ == "__main__":
    main()
