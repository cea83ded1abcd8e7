"""Times the linear maps of decode steps of RWKV-6 1.6B on one GPU, for several numbers of rows.

    python benchmarks/linear_maps.py [--rows 1,8,32,128,256] [--out FILE.json]

Each launch is timed in a CUDA graph of 24 launches with distinct weights, so that none are in the L2 cache: torch's products, ours in
graphs (weights are read ahead), and ours whose bits do not depend on the number of rows. All are first compared with float64.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.layers.linear import in_graph, linears, rows_alike

LAYERS = 24
MAPS = {
    "hidden": (2048, (160,)),
    "rkvg": (2048, (64, 2048, 2048, 2048, 2048)),
    "output": (2048, (2048,)),
    "key_rec": (2048, (7168, 2048)),
    "value": (7168, (2048,)),
    "head": (2048, (65536,)),
}
"""K, and the rows of the weights of a launch."""
KINDS = {"torch": (), "graph": (in_graph,), "alike": (rows_alike, in_graph)}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def computed(kind: str, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    with ExitStack() as stack:
        for enter in KINDS[kind]:
            stack.enter_context(enter())
        found = None if kind == "torch" else linears([x] * len(weights), weights)
    return [F.linear(x, weight) for weight in weights] if found is None else found


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def milliseconds(replay: Callable[[], object], count: int) -> float:
    """The median of five runs of so many replays."""
    found = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return statistics.median(found[1:])


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,128,256,384,512")
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.manual_seed(0)
    found = []
    print(f"{'rows':>5} {'':<8} " + " ".join(f"{name:>14}" for name in MAPS) + "   us a launch (TB/s of weights)")
    layers = {name: [[nn.Parameter(drawn(N, K) / K**0.5) for N in sizes] for _ in range(LAYERS)] for name, (K, sizes) in MAPS.items()}
    for rows in map(int, given.rows.split(",")):
        for kind in KINDS:
            line = []
            for name, (K, _) in MAPS.items():
                x = drawn(rows, K)
                for y, weight in zip(computed(kind, x, layers[name][0]), layers[name][0]):
                    wanted = x.double() @ weight.double().T
                    assert (y.double() - wanted).norm() <= 2 * torch.finfo(y.dtype).eps * wanted.norm(), (kind, rows, name)
                graph = graph_of(lambda x=x, name=name, kind=kind: [computed(kind, x, weights) for weights in layers[name]])
                us = milliseconds(graph.replay, 10) * 1e3 / LAYERS
                rate = sum(weight.nbytes for weight in layers[name][0]) / us / 1e6
                line.append(f"{us:7.1f} ({rate:4.2f})")
                found.append({"rows": rows, "kind": kind, "map": name, "us": us, "tb_s": rate})
            print(f"{rows:>5} {kind:<8} " + " ".join(f"{text:>14}" for text in line), flush=True)
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "times": found}, file, indent=1)


if __name__ == "__main__":
    main()
