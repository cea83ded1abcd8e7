"""Times what the host takes for a call on a GPU: microseconds a call, and seconds of a first call with empty caches.

    python benchmarks/host.py --out FILE.json [--seconds 150]

Calls are small, so the GPU waits for the host; ``behind`` is what the GPU still has to do when the host is done, which is then little.
Targets: 40 us for a forward pass, 200 us for a training step of one operator, 8 s for the first call. First calls run in processes of their
own, with an empty folder for Triton's cache; one process at a time.

torch runs a backward pass on a GPU in a thread of its own, so a step changes the thread twice, be it of one operator or of a model. Steps
are also timed on one thread (``torch.autograd.set_multithreading_enabled``). "torch" is a function of as many tensors that allocates its
results and computes nothing, "torch compiled" a product of two tensors.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import penstock as ps

NAMES = ("gla", "rwkv6", "rwkv5", "linear_attention", "retention", "simple_gla")
SHAPE = (1, 128, 4, 64)
FIRST = """
import sys, time
import torch
import penstock as ps
sys.path.insert(0, {folder!r})
from host import drawn, step
leaves, d = drawn({name!r}, (2, 1024, 8, 64), True)
torch.randn(8, device="cuda").sum().item()
begin = time.perf_counter()
step({name!r}, leaves, d)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def drawn(name: str, shape: tuple[int, int, int, int], gradients: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Inputs of a function, and the gradient of its output."""
    B, T, H, K = shape
    q, k, v, d = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
    made = [q, k * K**-0.5, v]
    if name in ("gla", "rwkv6"):
        made.append(-torch.rand(shape, device="cuda").bfloat16())
    elif name == "rwkv5":
        made.append(-torch.rand(H, K, device="cuda"))
    elif name == "simple_gla":
        made.append(-torch.rand(B, T, H, device="cuda"))
    if name in ("rwkv5", "rwkv6"):
        made.append(torch.randn(H, K, device="cuda"))
    return [x.requires_grad_(gradients) for x in made], d


def step(name: str, leaves: list[torch.Tensor], d: torch.Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(getattr(ps, name)(*leaves).output, leaves, d)


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


def first_call(name: str) -> float:
    """Seconds of the first training step of a process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        script = FIRST.format(folder=os.path.dirname(os.path.abspath(__file__)), name=name)
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="begin no further row after this time")
    parser.add_argument("--out")
    given = parser.parse_args()
    begin, rows = time.perf_counter(), []
    print("Microseconds a call; the first call in seconds.")
    for name in NAMES:
        if time.perf_counter() - begin > given.seconds:
            break
        inputs, _ = drawn(name, SHAPE, False)
        leaves, d = drawn(name, SHAPE, True)
        function = getattr(ps, name)
        product = torch.compile(lambda x, y: x * y, fullgraph=True, dynamic=False)
        compiled = torch.compile(lambda *x, function=function: function(*x).output, fullgraph=True, dynamic=False)
        pool, tokens = torch.zeros(4, 4, 64, 64, device="cuda"), [x[0, :4] if x.dim() > 2 else x for x in inputs]
        with torch.no_grad():
            row = {
                "forward": per_call(lambda: function(*inputs))[0],  # noqa: B023
                "decode": per_call(lambda: ps.decode_step(name, *tokens, state=pool))[0],  # noqa: B023
            }
        row |= steps("step", lambda: step(name, leaves, d))  # noqa: B023
        row |= steps("torch", lambda: torch.autograd.grad(Nothing.apply(*leaves), leaves, d))  # noqa: B023
        row |= steps("compiled step", lambda: torch.autograd.grad(compiled(*leaves), leaves, d))  # noqa: B023
        row |= steps("torch compiled", lambda: torch.autograd.grad(product(*leaves[:2]), leaves[:2], d))  # noqa: B023
        row["first call"] = first_call(name)
        rows.append({"name": name, **row})
        print(f"{name:18s}" + ", ".join(f"{key} {value:.1f}" for key, value in row.items() if "behind" not in key or value > 1), flush=True)
        torch._dynamo.reset()
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
