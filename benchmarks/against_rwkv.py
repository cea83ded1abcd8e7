"""Speed and logits on a CPU beside the `rwkv` package (strategy "cpu fp32") on a random RWKV-6 or RWKV-5.2 checkpoint.

    python benchmarks/against_rwkv.py [--version 6] [--layers 12] [--hidden-size 768] [--threads 2]

All read the same file. Prompts of 512 tokens, single tokens in float32 and bfloat16, and steps of the engine with 8 streams are timed in
turn: minima and medians of wall clock, and medians of the CPU time of all threads.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from penstock import models
from penstock.engine import Engine, SamplingParams

STREAMS = 8


def timed(call) -> tuple[float, float]:
    """Seconds of wall clock and of CPU time."""
    begin = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", choices=["5", "6"], default="6")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ.update(RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
    from rwkv.model import RWKV

    torch.manual_seed(0)
    make = models.rwkv6 if given.version == "6" else models.rwkv5
    model = models.CausalLM(make(vocab_size=given.vocab_size, hidden_size=given.hidden_size, num_layers=given.layers))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        models.save(model, path, format="blinkdl")
        ours, half = models.load(path), models.load(path, dtype=torch.bfloat16)
        theirs = RWKV(str(path.with_suffix("")), strategy="cpu fp32", verbose=False)
    tokens = torch.randint(given.vocab_size, (512,)).tolist()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits, state = theirs.forward(tokens, None)
        pool = ours.initial_state(1)
        found = ours.advance(ids, pool, last_only=True)[0]
        print("largest difference of logits, relative:", float((found - logits).norm() / logits.norm()))
        half_pool = half.initial_state(1)
        half.advance(ids, half_pool, last_only=True)
        engine = Engine(ours, slots=STREAMS, cache_bytes=0)
        for n in range(STREAMS):
            engine.submit(tokens[n : n + 8], SamplingParams(max_tokens=16 + 8 * given.rounds, temperature=0))
        for _ in range(4):  # prompts, and first steps of all streams
            engine.step()
        counts = {"ours prompt": 512, "rwkv prompt": 512, "ours token": 1, "rwkv token": 1, "bfloat16 token": 1, "engine step": STREAMS}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in counts}
        for _ in range(given.rounds):
            fresh = ours.initial_state(1)
            times["ours prompt"].append(timed(lambda fresh=fresh: ours.advance(ids, fresh, last_only=True)))
            times["rwkv prompt"].append(timed(lambda: theirs.forward(tokens, None)))
            for token in tokens[:8]:
                one = torch.tensor([[token]])
                times["ours token"].append(timed(lambda one=one: ours.advance(one, pool, last_only=True)))
                times["rwkv token"].append(timed(lambda token=token: theirs.forward([token], state)))
                times["bfloat16 token"].append(timed(lambda one=one: half.advance(one, half_pool, last_only=True)))
                times["engine step"].append(timed(engine.step))
    for name, seconds in times.items():
        walls, work = zip(*seconds)
        middle, least = statistics.median(walls), min(walls)
        rates = f"{counts[name] / middle:7.1f} token/s, at best {counts[name] / least:7.1f}"
        print(f"{name:14} {middle * 1e3:8.1f} ms, min {least * 1e3:8.1f}, CPU {statistics.median(work) * 1e3:8.1f}; {rates}")


if __name__ == "__main__":
    main()
