"""Host work of one decode step of the engine: milliseconds, calls of torch, and copies to the device. Needs no GPU.

    python benchmarks/engine_host.py [--only greedy,top_p] [--steps 200] [--profile]

The model's steps are stubs in the place of CUDA graphs: they return ready logits of ``--vocab`` tokens, few by default, so that torch's own
work on a CPU is small. The next step is launched before the tokens of the one before are read, as on a GPU. 128 streams complete chunks of
64 tokens at different steps, the tokenizer is ``Bytes``, and events go to an empty function. Counts are means of 64 steps: operators that
torch dispatches, without views, and copies from the host, some of which are operators too.
"""

import argparse
import cProfile
import gc
import itertools
import pstats
import statistics
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine import Engine, SamplingParams, graphs, runner, sampler, state_pool, transfer
from penstock.models import CausalLM, rwkv6
from penstock.models.tokenizers import Bytes

STREAMS = 128
OPTIONS = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "top_k, top_p, min_p": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "stop string": {"stop": ("a stop string that is not there",)},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "repetition penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {3: 1.0, 5: -1.0}},
    "logprobs": {"logprobs": 5},
}
SEVERAL = ("greedy", "temperature", "top_p", "top_k", "min_p", "stop string", "penalties", "logit_bias")
KINDS = {name: [SamplingParams(max_tokens=10**6, seed=1, **options)] for name, options in OPTIONS.items()}
KINDS["eight kinds"] = [KINDS[name][0] for name in SEVERAL]
"""Parameters of requests, in turn."""


class Calls(TorchDispatchMode):
    """Counts operators, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


class Copies:
    """Counts copies from the host."""

    def __init__(self) -> None:
        self.count = 0
        for module in (graphs, runner, sampler, state_pool, transfer):
            for name in ("from_buffer" if hasattr(transfer, "from_buffer") else "to_device", "fill"):
                if hasattr(module, name):
                    setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, function):
        def counted(*given):
            self.count += 1
            return function(*given)

        return counted


def engine_of(vocab_size: int) -> Engine:
    """An engine whose steps return ready logits."""
    torch.manual_seed(0)
    model = CausalLM(rwkv6(vocab_size=vocab_size, hidden_size=16, num_layers=1, head_size=8)).eval()
    engine = Engine(model, Bytes(), slots=STREAMS, token_budget=STREAMS + 1024, cache_bytes=0, overlap=True)
    logits = torch.randn(2048, vocab_size)
    engine._steps.runner.graphs = graphs.StepGraphs(
        model, engine._pool, engine._steps.runner.last, STREAMS + 1024, capture=lambda step: lambda: logits
    )
    return engine


def run(engine: Engine, kind: list[SamplingParams]):
    """Fill the engine with streams; returns a function that ends them."""
    params = itertools.cycle(kind)
    requests = [engine.submit([1] * (1 + n * 64 // STREAMS), next(params), sink=lambda *_: None) for n in range(STREAMS)]
    for _ in range(70):
        engine.step()

    def end() -> None:
        for request in requests:
            engine.cancel(request)
        while engine.step():
            pass

    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=";".join(KINDS), help="kinds, separated by semicolons")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine, copies = engine_of(given.vocab), Copies()
    print(f"{'kind':<22} {'least ms':>9} {'median ms':>9} {'calls':>7} {'copies':>7}")
    for name in given.only.split(";"):
        end = run(engine, KINDS[name])
        copies.count = 0
        with Calls() as calls:
            for _ in range(64):
                engine.step()
        counts = calls.count / 64, copies.count / 64
        times = []
        gc.collect()
        gc.disable()
        for _ in range(given.steps):
            begin = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - begin) * 1e3)
        gc.enable()
        print(f"{name:<22} {min(times):9.3f} {statistics.median(times):9.3f} {counts[0]:7.1f} {counts[1]:7.1f}", flush=True)
        if given.profile:
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(given.steps):
                engine.step()
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        end()


if __name__ == "__main__":
    main()
