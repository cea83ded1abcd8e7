"""What hooks cost: RWKV-6 1.6B with random weights and hooks on no layer, one mixer, one layer and all layers, on one GPU.

    python benchmarks/hooks.py [--out FILE.json]

Decode steps (as CUDA graphs, and as ``advance`` from Python), a prompt of 2048 tokens, a training step of 4 x 2048 tokens, and requests
of an engine, whose steps are no graphs where there are hooks.
"""

import argparse
import json
import statistics
import time

import torch
from linear_maps import milliseconds
from random_models import config_of, model_of

from penstock.engine import Engine, SamplingParams
from penstock.layers.linear import in_graph

PLACES = {
    "none": lambda model: [],
    "one mixer": lambda model: [model.layers[12].mixer],
    "one layer": lambda model: [model.layers[12]],
    "all layers": lambda model: list(model.layers),
}


def host_milliseconds(call, runs: int = 9) -> list[float]:
    found = []
    for _ in range(runs + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    return found[2:]


def captured(model, rows: int):
    pool, ids = model.initial_state(rows), torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    slots = torch.arange(rows, device="cuda")

    def step():
        with in_graph():
            return model.advance(ids, pool, slots=slots, last_only=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def cases(model) -> dict[str, list[float]]:
    found = {}
    for rows in (1, 128):
        found[f"decode, graph, {rows} rows"] = [milliseconds(captured(model, rows), 50) for _ in range(3)]
        pool, ids = model.initial_state(rows), torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
        found[f"decode, Python, {rows} rows"] = host_milliseconds(lambda pool=pool, ids=ids: model.advance(ids, pool, last_only=True))
    pool, ids = model.initial_state(1), torch.randint(65536, (4, 2049), device="cuda")
    found["prompt, 2048 tokens"] = host_milliseconds(lambda: model.advance(ids[:1, :-1], pool, last_only=True))

    def train():
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        model.zero_grad(set_to_none=True)

    found["training, 4 x 2048 tokens"] = host_milliseconds(train, 5)
    engine = Engine(model, slots=16)
    prompts = [[n, 2, 3] for n in range(16)]
    found["engine, 16 streams, 64 tokens"] = host_milliseconds(lambda: engine.generate(prompts, SamplingParams(max_tokens=64)), 3)
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = model_of(config_of("rwkv6"), torch.bfloat16, "cuda")
    shift = torch.zeros(2048, dtype=torch.bfloat16, device="cuda")
    rows = {}
    for name, places in PLACES.items():
        hooks = [one.register_forward_hook(lambda module, given, output: (output[0] + shift, *output[1:])) for one in places(model)]
        rows[name] = cases(model)
        for hook in hooks:
            hook.remove()
    for case in rows["none"]:
        plain = statistics.median(rows["none"][case])
        times = [f"{name} {statistics.median(row[case]):.3f} ({statistics.median(row[case]) / plain:.2f})" for name, row in rows.items()]
        print(f"{case:<30} {', '.join(times)}")
    if given.out:
        with open(given.out, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ms": rows}, file, indent=1)


if __name__ == "__main__":
    main()
