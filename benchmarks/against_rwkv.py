"""Speed and logits on a CPU beside the `rwkv` package (strategy "cpu fp32") on a random RWKV-6 or RWKV-5.2 checkpoint.

    python benchmarks/against_rwkv.py [--version 6] [--layers 12] [--hidden-size 768]

Both read the same file. Prompts of 512 tokens and single tokens are timed in turn; medians.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from penstock import models


def timed(call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", choices=["5", "6"], default="6")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
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
        ours, theirs = models.load(path), RWKV(str(path.with_suffix("")), strategy="cpu fp32", verbose=False)
    tokens = torch.randint(given.vocab_size, (512,)).tolist()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits, state = theirs.forward(tokens, None)
        pool = ours.initial_state(1)
        found = ours.advance(ids, pool, last_only=True)[0]
        print("largest difference of logits, relative:", float((found - logits).norm() / logits.norm()))
        times: dict[str, list[float]] = {name: [] for name in ("ours prompt", "rwkv prompt", "ours token", "rwkv token")}
        for _ in range(given.rounds):
            fresh = ours.initial_state(1)
            times["ours prompt"].append(timed(lambda fresh=fresh: ours.advance(ids, fresh, last_only=True)))
            times["rwkv prompt"].append(timed(lambda: theirs.forward(tokens, None)))
            for token in tokens[:8]:
                one = torch.tensor([[token]])
                times["ours token"].append(timed(lambda one=one: ours.advance(one, pool, last_only=True)))
                times["rwkv token"].append(timed(lambda token=token: theirs.forward([token], state)))
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rate = (512 if "prompt" in name else 1) / middle
        print(f"{name:12} {middle * 1e3:8.1f} ms, {rate:7.1f} token/s")


if __name__ == "__main__":
    main()
