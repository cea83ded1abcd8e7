"""Times what the host takes for a call on a GPU: microseconds a call, and seconds of a first call with empty caches.

    python benchmarks/host.py --out FILE.json [--seconds 150]

Calls are small, so the GPU waits for the host. Targets: 40 us for a forward pass, 200 us for a training step of one operator, 8 s for the
first call. First calls run in processes of their own, with an empty folder for Triton's cache; one process at a time.
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


def per_call(call, loops: int = 5, calls: int = 300) -> float:
    """Microseconds a call, the median of loops of calls without synchronisation."""
    for _ in range(30):
        call()
    found = []
    for _ in range(loops):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


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
    print(f"{'':18s} forward us    step us  compiled us  decode us   first call s")
    for name in NAMES:
        if time.perf_counter() - begin > given.seconds:
            break
        inputs, _ = drawn(name, SHAPE, False)
        leaves, d = drawn(name, SHAPE, True)
        function = getattr(ps, name)
        compiled = torch.compile(lambda *x, function=function: function(*x).output, fullgraph=True, dynamic=False)
        pool, tokens = torch.zeros(4, 4, 64, 64, device="cuda"), [x[0, :4] if x.dim() > 2 else x for x in inputs]
        with torch.no_grad():
            row = {"forward": per_call(lambda: function(*inputs))}  # noqa: B023
        row["step"] = per_call(lambda: step(name, leaves, d))  # noqa: B023
        row["compiled step"] = per_call(lambda: torch.autograd.grad(compiled(*leaves), leaves, d))  # noqa: B023
        with torch.no_grad():
            row["decode"] = per_call(lambda: ps.decode_step(name, *tokens, state=pool))  # noqa: B023
        row["first call"] = first_call(name)
        rows.append({"name": name, **row})
        print(f"{name:18s}" + "".join(f"{row[key]:11.1f}" for key in row), flush=True)
        torch._dynamo.reset()
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
