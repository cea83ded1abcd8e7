"""Trains fla's own models on one GPU with and without ``penstock.compat.fla.patch()``: the loss of each step, and the time of a step.

    python benchmarks/patched_fla.py [--model rwkv7] --out FILE.json

All runs read the same batches, of 8 x 2048 tokens in bfloat16. Every second token is a function of the one before it, so that there is
something to learn. Runs begin from the same weights, but for a second run of fla, whose embeddings are off by one rounding: it shows how
far losses come apart by rounding alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from fla_models import VOCABULARY as V
from fla_models import small_model, tune_briefly

from penstock.compat import fla as compat

B, T = 8, 2048


def batch(step: int, follower: torch.Tensor) -> torch.Tensor:
    """The tokens of a step."""
    x = torch.randint(V, (B, T), generator=torch.Generator("cuda").manual_seed(step), device="cuda")
    x[:, 1::2] = follower[x[:, ::2]]
    return x


def run(make: Callable[[], torch.nn.Module], weights: dict[str, torch.Tensor], steps: int) -> tuple[list[float], list[float]]:
    """Losses and milliseconds of all steps."""
    model = make().cuda().bfloat16()
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    follower = torch.randint(V, (V,), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    losses, times = [], []
    for step in range(steps):
        x = batch(step, follower)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        losses.append(loss.item())
    return losses, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("rwkv6", "rwkv7", "gated_deltanet", "kda"), default="rwkv6")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out")
    given = parser.parse_args()
    tune_briefly()
    torch.manual_seed(0)
    make = partial(small_model, given.model, given.layers)
    weights = {name: x.clone() for name, x in make().cuda().bfloat16().state_dict().items()}
    rows = {"fla": run(make, weights, given.steps)}
    nudged = {name: x * (1 + 2**-7) if "embeddings" in name else x for name, x in weights.items()}
    rows["fla, off by a rounding"] = run(make, nudged, given.steps)
    patched = compat.patch()
    print("replaced:", *patched.replaced)
    rows["patched"] = run(make, weights, given.steps)
    (theirs, slow), (off, _), (ours, fast) = rows.values()
    settled = slice(given.steps // 5, None)  # the first steps compile and tune
    times = [statistics.median(one[settled]) for one in (slow, fast)]
    print(f"a step: fla {times[0]:.1f} ms, patched {times[1]:.1f} ms, {times[0] / times[1]:.2f} times as fast")
    print("step, loss of fla, of fla off by a rounding, of patched")
    for step in range(0, given.steps, max(given.steps // 10, 1)):
        print(f"{step:4d} {theirs[step]:8.4f} {off[step]:8.4f} {ours[step]:8.4f}")
    apart = [max(abs(a - b) for a, b in zip(theirs, one)) for one in (off, ours)]
    print(f"largest difference of losses {apart[1]:.4f}, by a rounding alone {apart[0]:.4f}")
    if given.out:
        with open(given.out, "w") as file:
            runs = {name: {"losses": a, "ms": b} for name, (a, b) in rows.items()}
            json.dump({"model": given.model, "device": torch.cuda.get_device_name(), **runs}, file)


if __name__ == "__main__":
    main()
