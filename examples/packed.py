"""Packed training: no padding, and no sequence sees another.

Documents of very different lengths are trained once as rows with padding, once packed into one row with `cu_seqlens`. The first losses are
equal up to rounding, from which later steps differ a little; the packed steps compute no padding.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib
import torch

from penstock.demo.text import python_topics
from penstock.models import CausalLM, gla

matplotlib.use("agg")
from matplotlib import pyplot

IGNORED = -100


def documents(count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Pieces of a text, exponentially long."""
    text = torch.frombuffer(bytearray(python_topics()), dtype=torch.uint8).long()
    lengths = torch.empty(count).exponential_(1 / 96, generator=generator).long().clamp(2, 1024)
    begins = torch.randint(len(text) - 1024, (count,), generator=generator)
    return [text[begin : begin + length] for begin, length in zip(begins.tolist(), lengths.tolist())]


def padded_loss(model: CausalLM, batch: list[torch.Tensor]) -> torch.Tensor:
    """A row for each document."""
    ids = torch.nn.utils.rnn.pad_sequence([one[:-1] for one in batch], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([one[1:] for one in batch], batch_first=True, padding_value=IGNORED)
    return model.loss(ids, labels, ignore_index=IGNORED)


def packed_loss(model: CausalLM, batch: list[torch.Tensor]) -> torch.Tensor:
    """All documents in one row."""
    lengths = torch.tensor([0, *(len(one) - 1 for one in batch)])
    ids, labels = torch.cat([one[:-1] for one in batch])[None], torch.cat([one[1:] for one in batch])[None]
    return model.loss(ids, labels, cu_seqlens=lengths.cumsum(0))


def main() -> dict[str, tuple[list[float], float]]:
    """Train both ways, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("packed.png"))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other
    found = {}
    for name, loss_of in (("padded", padded_loss), ("packed", packed_loss)):
        torch.manual_seed(0)
        model = CausalLM(gla(vocab_size=256, hidden_size=64, num_layers=2, num_heads=2))
        optimizer, generator = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
        losses, tokens, begun = [], 0, time.process_time()
        for _ in range(options.steps):
            batch = documents(16, generator)
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            tokens += sum(len(one) - 1 for one in batch)
        found[name] = losses, tokens / (time.process_time() - begun)
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {found[name][1]:,.0f} tokens a second of CPU time")
    figure, (curves, rates) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(2, 1))
    for (name, (losses, _)), style in zip(found.items(), ("-", "--")):
        curves.plot(losses, style, label=name)
    curves.set(title="loss", xlabel="steps", ylabel="nats per byte")
    curves.legend()
    rates.bar(list(found), [rate for _, rate in found.values()], color=["tab:blue", "tab:orange"])
    rates.set(title="tokens a second of CPU time")
    figure.savefig(options.plot, dpi=110)
    return found


if __name__ == "__main__":
    main()
