"""Times what the host takes for a call on a GPU, in microseconds. ``first_calls.py`` times first calls.

    python benchmarks/host.py --out FILE.json [--only kda;rwkv7] [--seconds 150]

Calls are small, so the GPU waits for the host; ``behind`` is what the GPU still has to do when the host is done, which is then little.
Targets: 40 us for a forward pass, 200 us for a training step of one operator.

torch runs a backward pass on a GPU in a thread of its own, so a step changes the thread twice, be it of one operator or of a model. Steps
are also timed on one thread (``torch.autograd.set_multithreading_enabled``). "torch" is a function of as many tensors that allocates its
results and computes nothing, "torch compiled" a product of two tensors.
"""

import argparse
import json
import statistics
import time
from functools import partial

import torch
from first_calls import NAMES, drawn

import penstock as ps

SHAPE = {"B": 1, "T": 128, "H": 4, "D": 64}
SHARED = {"r": "q", "w": "g"}
"""Names of arguments in functions that take the name of a variant."""


def output(name: str, names: tuple[str, ...], options: dict, *tensors: torch.Tensor) -> torch.Tensor:
    """The output of a call over sequences."""
    return getattr(ps, name)(**dict(zip(names, tensors)), **options).output


def step(function, leaves: list[torch.Tensor], d: torch.Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(function(*leaves), leaves, d)


class Nothing(torch.autograd.Function):
    """Saves its arguments and allocates results like them."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return torch.empty_like(tensors[0])

    @staticmethod
    def backward(ctx, d):
        return tuple([torch.empty_like(x) for x in ctx.saved_tensors])


def per_call(call, loops: int = 5, calls: int = 300) -> tuple[float, float]:
    """Microseconds a call, the median of loops of calls without synchronisation, and those that the GPU is behind the host."""
    for _ in range(30):
        call()
    found, behind = [], []
    for _ in range(loops):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        end = time.perf_counter()
        torch.cuda.synchronize()
        found.append((end - begin) / calls * 1e6)
        behind.append((time.perf_counter() - end) / calls * 1e6)
    return statistics.median(found), statistics.median(behind)


def steps(what: str, call) -> dict[str, float]:
    """Times of a training step, with torch's threads and without."""
    threads, behind = per_call(call)
    with torch.autograd.set_multithreading_enabled(False):
        one, _ = per_call(call)
    return {what: threads, f"{what}, one thread": one, f"{what}, behind": behind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="begin no further row after this time")
    parser.add_argument("--only", default=";".join(NAMES), help="names, separated by semicolons")
    parser.add_argument("--out")
    given = parser.parse_args()
    begin, rows = time.perf_counter(), []
    print("Microseconds a call.")
    for name in given.only.split(";"):
        if time.perf_counter() - begin > given.seconds:
            break
        x, options = drawn(name, torch.bfloat16, **SHAPE)
        function, inputs = partial(output, name, tuple(x), options), list(x.values())
        leaves = [one.clone().requires_grad_() for one in inputs]
        d = torch.randn_like(function(*inputs))
        product = torch.compile(lambda x, y: x * y, fullgraph=True, dynamic=False)
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        pool = torch.zeros(4, 4, 64, 64, device="cuda")
        tokens = {SHARED.get(one, one): t[0, :4] if t.dim() > 2 else t for one, t in x.items()} | options
        with torch.no_grad():
            row = {
                "forward": per_call(lambda: function(*inputs))[0],  # noqa: B023
                "decode": per_call(lambda: ps.decode_step(name, **tokens, state=pool))[0],  # noqa: B023
            }
        row |= steps("step", lambda: step(function, leaves, d))  # noqa: B023
        row |= steps("torch", lambda: torch.autograd.grad(Nothing.apply(*leaves), leaves, d))  # noqa: B023
        row |= steps("compiled step", lambda: torch.autograd.grad(compiled(*leaves), leaves, d))  # noqa: B023
        row |= steps("torch compiled", lambda: torch.autograd.grad(product(*leaves[:2]), leaves[:2], d))  # noqa: B023
        rows.append({"name": name, **row})
        print(f"{name:18s}" + ", ".join(f"{key} {value:.1f}" for key, value in row.items() if "behind" not in key or value > 1), flush=True)
        torch._dynamo.reset()
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
