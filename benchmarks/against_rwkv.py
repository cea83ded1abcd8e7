"""Speed and logits on a CPU beside the `rwkv` package (strategy "cpu fp32") on a random RWKV-7, RWKV-6 or RWKV-5.2 checkpoint.

    python benchmarks/against_rwkv.py [--version 7] [--layers 12] [--hidden-size 768] [--threads 2]

All read the same file. Prompts of 512 tokens, single tokens in float32 and bfloat16, and steps of the engine with 8 streams are timed in
turn. Printed are minima and medians of wall clock, medians of the CPU time of all threads, and tokens per second beside those of the
package: the median and the quartiles of the ratios of neighbouring calls. Other work on the machine changes ratios less than times.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path

import torch

from penstock import models
from penstock.engine import Engine, SamplingParams
from penstock.verify.machine import Machine

STREAMS = 8
PROMPT = 512
MAKERS = {"5": models.rwkv5, "6": models.rwkv6, "7": models.rwkv7}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", choices=list(MAKERS), default="6")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=5, help="Prompts, each with eight tokens.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ.update(RWKV_JIT_ON="1", RWKV_CUDA_ON="0", RWKV_V7_ON=str(int(given.version == "7")))
    from rwkv.model import RWKV  # reads the environment

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        write_checkpoint(given.version, given.vocab_size, given.hidden_size, given.layers, path)
        ours, half = models.load(path), models.load(path, dtype=torch.bfloat16)
        theirs = RWKV(str(path.with_suffix("")), strategy="cpu fp32", **({} if given.version == "7" else {"verbose": False}))
    tokens = torch.randint(given.vocab_size, (PROMPT,)).tolist()
    with torch.no_grad():
        compare_logits(ours, theirs, tokens)
        found = measure(ours, half, theirs, tokens, given.rounds)
    print(Machine.here().lines()[0][1])
    show(found)


def write_checkpoint(version: str, vocab_size: int, hidden_size: int, layers: int, path: Path) -> None:
    """A model with random matrices: new ones have zeros at the ends of blocks."""
    model = models.CausalLM(MAKERS[version](vocab_size=vocab_size, hidden_size=hidden_size, num_layers=layers))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    models.save(model, path, format="blinkdl")


def compare_logits(ours, theirs, tokens: list[int]) -> None:
    """Print the difference after a prompt, and after eight more tokens one by one."""
    logits, state = theirs.forward(tokens, None)
    pool = ours.initial_state(1)
    found = ours.advance(torch.tensor([tokens]), pool, last_only=True)[0]
    far = [(found - logits).norm() / logits.norm()]
    for token in tokens[:8]:
        logits, state = theirs.forward([token], state)
        found = ours.advance(torch.tensor([[token]]), pool, last_only=True)[0]
        far.append((found - logits).norm() / logits.norm())
    print(f"difference of logits, relative: prompt {far[0]:.1e}, tokens at most {max(far[1:]):.1e}")


def measure(ours, half, theirs, tokens: list[int], rounds: int) -> dict[str, tuple[int, list[tuple[float, float]]]]:
    """By name: the tokens of a call, and the seconds of wall clock and of CPU time of each call."""
    ids, each = torch.tensor([tokens]), cycle(tokens)
    _, state = theirs.forward(tokens, None)
    pools = [(model, model.initial_state(1)) for model in (ours, half)]
    for model, pool in pools:
        model.advance(ids, pool, last_only=True)
    engine = Engine(ours, slots=STREAMS, cache_bytes=0)
    for n in range(STREAMS):
        engine.submit(tokens[n : n + 8], SamplingParams(max_tokens=16 + 8 * rounds, temperature=0))
    for _ in range(4):  # prompts, and first steps of all streams
        engine.step()
    single, narrow = (
        lambda model=model, pool=pool: model.advance(torch.tensor([[next(each)]]), pool, last_only=True) for model, pool in pools
    )
    calls = {
        "ours prompt": (PROMPT, 1, lambda: ours.advance(ids, ours.initial_state(1), last_only=True)),
        "rwkv prompt": (PROMPT, 1, lambda: theirs.forward(tokens, None)),
        "ours token": (1, 8, single),
        "rwkv token": (1, 8, lambda: theirs.forward([next(each)], state)),
        "bfloat16 token": (1, 8, narrow),
        "engine step": (STREAMS, 8, engine.step),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for turn in range(8):
            for name, (_, repeats, call) in calls.items():
                if turn < repeats:
                    times[name].append(timed(call))
    return {name: (calls[name][0], found) for name, found in times.items()}


def timed(call) -> tuple[float, float]:
    """Seconds of wall clock and of CPU time."""
    begin = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def show(found: dict[str, tuple[int, list[tuple[float, float]]]]) -> None:
    """Print a line for each kind of call."""
    print(f"{'':14} {'median':>9} {'minimum':>9} {'CPU':>9} {'tokens/s':>9}   times the package's: median (quartiles)")
    for name, (count, seconds) in found.items():
        walls, work = zip(*seconds)
        middle = statistics.median(walls)
        columns = " ".join(f"{1e3 * value:6.1f} ms" for value in (middle, min(walls), statistics.median(work)))
        peer_count, peer = found["rwkv prompt" if "prompt" in name else "rwkv token"]
        ratios = [count / peer_count * other / one for one, (other, _) in zip(walls, peer)]
        low, mid, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"{name:14} {columns} {count / middle:9.1f}   {mid:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
