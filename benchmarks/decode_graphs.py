"""Times single steps of a model with random weights as CUDA graphs on one GPU: decode rows, and decode rows beside pieces of prompts.

    python benchmarks/decode_graphs.py [--model rwkv7] [--profile "1 row"] [--only "64 rows;128 rows"] [--out FILE.json]

``batch_invariant``: the graphs of an engine with this option.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable

import torch
from linear_maps import milliseconds
from random_models import SIZES, config_of, model_of

from penstock.engine.graphs import Batch, StepGraphs
from penstock.engine.state_pool import StatePool

SLOTS = 132
CASES = {
    "1 row": (1, ()), "8 rows": (8, ()), "32 rows": (32, ()), "64 rows": (64, ()), "128 rows": (128, ()), "20 tokens": (0, (20,)),
    "126 rows, 2 pieces of 64": (126, (64, 64)), "127 rows, 896 tokens": (127, (896,)),
}  # fmt: skip
"""Decode rows, and the tokens of pieces."""
BLOCK = 1
"""Of ``batch_invariant``."""


def batch_of(pool: StatePool, rows: int, pieces: tuple[int, ...]) -> Batch:
    ids, ends, slots = [*range(rows)], [*range(rows + 1)], [*range(rows)]
    for n, tokens in enumerate(pieces):
        ids += [7] * tokens
        ends.append(len(ids))
        slots.append(pool.aligned(rows + n))
    return Batch(ids, [-1] * len(ids), ends, slots)


def profile(replay: Callable[[], object]) -> None:
    """Kernels by time. Those that begin early also count the time that they wait."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    times, counts = Counter(), Counter()
    for event in seen.events():
        times[event.name[:80]] += event.time_range.elapsed_us()
        counts[event.name[:80]] += 1
    for name, us in times.most_common(12):
        print(f"    {us:9.1f} us {counts[name]:5d} x  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="rwkv6")
    parser.add_argument("--profile", choices=CASES)
    parser.add_argument("--only", default=";".join(CASES), help="cases, separated by semicolons")
    parser.add_argument("--out")
    given = parser.parse_args()
    cases = {case: CASES[case] for case in given.only.split(";")}
    torch.manual_seed(0)
    model = model_of(config_of(given.model), torch.bfloat16, "cuda")
    pool, found = StatePool(model, SLOTS), []
    last = torch.zeros(SLOTS, dtype=torch.int64, device="cuda")
    for name, block in (("graphs", 0), ("batch_invariant", BLOCK)):
        graphs = StepGraphs(model, pool, last, 2048, block)
        for case, (rows, pieces) in cases.items():
            batch = batch_of(pool, rows, pieces)
            with torch.no_grad():
                graphs.run(batch)
            replay = [*graphs._graphs.values()][-1].replay  # the last one that was captured
            ms = milliseconds(replay, 50)
            found.append({"graphs": name, "case": case, "ms": ms})
            print(f"{name:<16} {case:<26} {ms:.3f} ms", flush=True)
            if case == given.profile:
                profile(replay)
    if given.out:
        with open(given.out, "w") as file:
            json.dump(
                {"model": given.model, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "times": found}, file, indent=1
            )


if __name__ == "__main__":
    main()
