"""Times heads that share q and k on one GPU: with the backward kernel for groups, and with gradients of q and k of every head.

    python benchmarks/groups.py [--json FILE.json] [--seconds 1]

Inputs are bfloat16, q and k are [B,T,G,K]. First small calls are compared with float64, with and without the kernel. Times are GPU time in
milliseconds from CUDA graphs that are replayed in turn: medians.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import triton

import penstock
from penstock.bench import clock
from penstock.call.derivatives import gradients_of
from penstock.call.memory import Memory
from penstock.recurrence import chunkwise, rounded
from penstock.recurrence.gradients import Gradients
from penstock.recurrence.operators import RECURRENCE
from penstock.recurrence.triton import plan
from penstock.recurrence.triton.forms import groups, lists
from penstock.tokens.shape import Shape
from penstock.verify.inputs import Inputs, inputs
from penstock.verify.oracle import budget, error

IMPL = "triton_chunkwise"
CASES = (
    ("simple_gla", Shape(2, 4096, 80, 128, 64), 1),
    ("simple_gla", Shape(4, 2048, 64, 128, 64), 1),
    ("simple_gla", Shape(8, 2048, 40, 128, 64), 1),
    ("simple_gla", Shape(2, 4096, 80, 128, 64), 8),
    ("linear_attention", Shape(8, 2048, 32, 128, 64), 1),
    ("retention", Shape(8, 2048, 32, 128, 64), 1),
)
"""Variant, shape and G. Mamba-2 2.7B, 1.3B and others; the heads of the last two as in "Walks of heads of 128 key channels"."""
SMALL = ((1, 300, 16, 128, 64), (24, 200, 8, 128, 64), (2, 150, 8, 64, 48))
"""Shapes that are compared with float64: a group in several programs, in one, and other sizes."""


def drawn(variant: str, shape: Shape, G: int) -> Inputs:
    x = inputs(variant, shape, torch.bfloat16, "cuda")
    return replace(x, q=x.q[:, :, :G].contiguous(), k=x.k[:, :, :G].contiguous())


def enable(kernel: bool) -> None:
    """Use the kernel or not; earlier plans are forgotten."""
    forms = tuple(one for one in lists.CHUNK_BACKWARD if kernel or one is not groups.BACKWARD)
    plan.CHUNK_BACKWARD, RECURRENCE.memory = forms, Memory()


def check(variant: str, shape: Shape, G: int, kernel: bool) -> float:
    """Raise unless all gradients are within their budgets; the largest error."""
    x, random = drawn(variant, shape, G), torch.Generator("cuda").manual_seed(7)
    B, _, H, K, V = shape
    state, d_state = (torch.randn(B, H, K, V, generator=random, device="cuda") for _ in range(2))
    d_output = torch.randn(x.v.shape, generator=random, device="cuda").to(x.v.dtype)
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.u)]
    enable(kernel)
    found = RECURRENCE(variant, (*leaves, None, state.requires_grad_()), (None, False, True), IMPL)
    asked = {name: t for name, t in zip(Gradients._fields, (*leaves, state)) if t is not None}
    grads = dict(zip(asked, torch.autograd.grad(found, tuple(asked.values()), (d_output, d_state))))

    doubles = [None if t is None else t.detach().double() for t in (*leaves, None, state)]
    problem = RECURRENCE.checked(variant, doubles, (x.scale, False, True))

    def exact(formula: Callable) -> dict[str, torch.Tensor | None]:
        with torch.no_grad():
            return dict(zip(Gradients._fields, gradients_of(lambda p: formula(p.whole), problem, (d_output.double(), d_state.double()))))

    wanted, largest = exact(chunkwise.forward), 0.0
    draws = [exact(formula) for formula in rounded.formulas(rounded.BFLOAT16)]
    for name, gradient in grads.items():
        if variant == "retention" and name == "g":  # a constant whose gradient is a sum over tokens that cancels
            continue
        apart = error(gradient, wanted[name])
        allowed = budget(torch.bfloat16, gradient.dtype) + 2 * max(error(draw[name], wanted[name]) for draw in draws)
        if not apart <= allowed:
            raise SystemExit(f"{variant} {shape.text} G={G}: gradient of {name} is off by {apart:.2e}, allowed {allowed:.2e}")
        largest = max(largest, apart)
    return largest


def calls(x: Inputs) -> dict[str, Callable[[], object]]:
    """Forward, and forward with backward from a given gradient of the output."""
    leaves = x.with_gradients()
    d_output = torch.randn_like(x.v)

    def forward() -> object:
        with torch.no_grad():
            return x.run(IMPL)

    def training() -> object:
        return torch.autograd.grad(leaves.run(IMPL), tuple(leaves.trained.values()), d_output)

    return {"forward": forward, "training": training}


def timed(variant: str, shape: Shape, G: int, seconds: float) -> list[dict]:
    """Median GPU times with and without the kernel, replayed in turn."""
    device, x, graphs = torch.device("cuda", torch.cuda.current_device()), drawn(variant, shape, G), []
    made = {kernel: calls(x) for kernel in (True, False)}  # graphs read their tensors
    for kernel, both in made.items():
        enable(kernel)
        for mode, call in both.items():
            call()
            graph = clock.captured(call, device)
            if isinstance(graph, str):
                raise SystemExit(f"{variant} {shape.text} {mode}: {graph}")
            graphs.append((kernel, mode, graph))
    samples = clock.in_turn([graph.replay for _, _, graph in graphs], device, seconds)
    return [
        {
            "variant": variant,
            "shape": shape.text,
            "G": G,
            "kernel": kernel,
            "mode": mode,
            "milliseconds": statistics.median(found) / graph.calls,
        }
        for (kernel, mode, graph), found in zip(graphs, samples)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each graph")
    given = parser.parse_args()
    errors = {}
    for variant in ("simple_gla", "linear_attention", "retention"):
        for sizes in SMALL:
            for G in (1, 2):
                for kernel in (True, False):
                    name = f"{variant} {Shape(*sizes).text} G={G}" + " without the kernel" * (not kernel)
                    errors[name] = check(variant, Shape(*sizes), G, kernel)
                    print(f"{name}: largest error {errors[name]:.1e}", flush=True)
    times = []
    print(f"\n{'':<56} {'forward':>9} {'training':>9}   ms")
    for variant, shape, G in CASES:
        found = timed(variant, shape, G, given.seconds)
        times += found
        for kernel in (True, False):
            row = [one["milliseconds"] for one in found if one["kernel"] == kernel]
            label = f"{variant} {shape.text} G={G}" + " without the kernel" * (not kernel)
            print(f"{label:<56} {row[0]:9.4f} {row[1]:9.4f}", flush=True)
    if given.json:
        about = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "penstock": penstock.__version__,
        }
        with open(given.json, "w") as file:
            json.dump(about | {"errors": errors, "times": times}, file, indent=1)


if __name__ == "__main__":
    main()
