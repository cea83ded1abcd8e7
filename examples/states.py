"""States of the engine: keep one, continue from it, fork it.

The memory of a sequence is a state of fixed size. An answer about a long document is computed from the document's text, and from a state
that was kept. Both give equal tokens; the second takes the same time however long the document is.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import matplotlib
import torch

from penstock.engine import Engine, SamplingParams
from penstock.models import CausalLM, rwkv7
from penstock.models.tokenizers import Bytes

matplotlib.use("agg")
from matplotlib import pyplot

SENTENCE = "The recurrence reads one token and changes its state. "
QUESTION = "What changes?"


def timed(engine: Engine, prompt: str | list[int], state: object = None) -> tuple[float, list[int]]:
    """Seconds of five tokens after a prompt, and the tokens."""
    begun = time.perf_counter()
    request = engine.submit(prompt, SamplingParams(max_tokens=5, seed=1), state=state)
    while not request.done:
        engine.step()
    return time.perf_counter() - begun, request.result.tokens


def main() -> list[tuple[int, float, float]]:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("states.png"))
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest document")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other
    torch.manual_seed(0)
    model = CausalLM(rwkv7(vocab_size=256, hidden_size=128, num_layers=4, head_size=32)).eval()
    engine = Engine(model, Bytes(), slots=8, cache_bytes=0)  # without its own cache of prefixes, which would hide the difference
    timed(engine, "warm up")
    found, length = [], 1024
    while length <= options.longest:
        document = (SENTENCE * (length // len(SENTENCE) + 1))[:length]
        kept = engine.generate(document, SamplingParams(max_tokens=1, seed=0, keep_state=True))[0].completions[0].state
        text = [*kept.tokens, *Bytes().encode(QUESTION)]
        from_text, tokens = timed(engine, text)
        from_state, same = timed(engine, QUESTION, kept)
        assert tokens == same, "tokens do not depend on where a prompt is cut"
        found.append((length, from_text, from_state))
        print(f"{length:6} tokens: {1000 * from_text:7.0f} ms from the text, {1000 * from_state:5.0f} ms from its state; equal tokens")
        length *= 2
    branches = [engine.submit(QUESTION, SamplingParams(max_tokens=5, seed=seed), state=kept) for seed in range(3)]
    while not all(one.done for one in branches):
        engine.step()
    print("three answers from one state, in one batch:", [one.result.tokens for one in branches])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "document.safetensors"
        engine.save_state(kept, file)
        print(f"the state of {len(kept.tokens)} tokens as a file: {file.stat().st_size / 1024:.0f} KiB")
    engine.close()
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot([row[0] for row in found], [1000 * row[1] for row in found], marker="o", label="from the text")
    axes.plot([row[0] for row in found], [1000 * row[2] for row in found], marker="o", label="from a kept state")
    axes.set(title="five tokens of an answer", xlabel="tokens of the document", ylabel="ms", ylim=(0, None))
    axes.legend()
    figure.savefig(options.plot, dpi=110)
    return found


if __name__ == "__main__":
    main()
