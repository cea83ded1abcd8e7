"""The cost of tuned states and adapters in one batch, against the same engine without them: ``python benchmarks/tunings.py``.

64 requests run together, each with a prompt of 64 tokens and 64 new ones: all of the model itself, with a tuned state each, or one of 8
LoRAs of rank 16 on all linear maps of the layers. Times are those of the process (CPU) or of the clock (GPU), rounds alternate.
"""

import argparse
import json
import math
import statistics
import time

import torch
from torch import nn

from penstock.engine import Engine, SamplingParams
from penstock.models import CausalLM, rwkv6
from penstock.models.arguments import named_tensors

REQUESTS, TOKENS = 64, 64


def states_of(model: CausalLM) -> dict:
    """Random ones, as large as those of texts."""
    found = {}
    for n in range(REQUESTS):
        state = model.initial_state(1)
        for _, x in named_tensors(state):
            x.normal_(generator=torch.Generator(x.device).manual_seed(n))
        found[f"state{n}"] = state
    return found


def adapters_of(model: CausalLM, count: int = 8, rank: int = 16) -> dict:
    """Random ones of all linear maps of the layers."""
    maps = [(f"{name}.weight", one.weight) for name, one in model.layers.named_modules(prefix="layers") if isinstance(one, nn.Linear)]
    return {
        f"adapter{n}": {
            name: (torch.randn(rank, W.shape[1]) / math.sqrt(W.shape[1]), torch.randn(W.shape[0], rank) / rank) for name, W in maps
        }
        for n in range(count)
    }


def main() -> None:
    """Print a table, and JSON to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    model = CausalLM(rwkv6(vocab_size=4096, hidden_size=given.hidden, num_layers=given.layers, head_size=64)).to(given.device, dtype).eval()
    options = {"slots": REQUESTS, "token_budget": 2048, "cache_bytes": 0}
    cases = {
        "model": (Engine(model, **options), [None] * REQUESTS),
        "64 tuned states": (engine := Engine(model, states=states_of(model), **options), list(engine.tunings)),
        "8 adapters": (engine := Engine(model, adapters=adapters_of(model), **options), list(engine.tunings) * (REQUESTS // 8)),
    }
    clock = time.process_time if given.device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in cases}
    prompts = [[(7 * n + t) % 4096 for t in range(64)] for n in range(REQUESTS)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    for _ in range(given.rounds + 1):
        for name, (one, tunings) in cases.items():
            begin = clock()
            requests = [one.submit(prompt, params, tuning=tuning) for prompt, tuning in zip(prompts, tunings)]
            while not all(request.done for request in requests):
                one.step()
            times[name].append(clock() - begin)
    base = times["model"][1:]
    rows = {}
    for name, found in times.items():
        ratios = [x / y for x, y in zip(found[1:], base)]
        rows[name] = {
            "seconds": statistics.median(found[1:]),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        print(f"{name:16} {rows[name]['seconds']:8.3f} s   {rows[name]['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"arguments": vars(given), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
