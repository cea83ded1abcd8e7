"""Compiles what fla's tuning tries, by processes side by side: without it the first step of a model takes fla two minutes and more.

    python benchmarks/compile_fla.py gla "patched rwkv7" [--processes 15] [--seconds 90]

Each process trains a few layers of a model of ``training_step.py`` or of ``patched_fla.py`` ("patched ...") and compiles its share of the
configurations, without running or timing them, into Triton's cache. Its choices are not kept: tuning comes later, alone on the GPU.
"""

import argparse
import os
import subprocess
import sys
import time

SHARED = 227 * 2**10
"""Bytes of shared memory of a program on an H200."""


def tune_nothing(rank: int, processes: int) -> None:
    """Let the tuner compile one configuration of every few, and choose the first that fits."""
    os.environ["FLA_CACHE_RESULTS"] = "0"
    os.environ.pop("TRITON_CACHE_AUTOTUNING", None)
    from triton.runtime.autotuner import Autotuner

    def bench(self, *args, config, **meta):
        place = self.configs.index(config) if config in self.configs else 0
        if place and place % processes != rank:
            return [2.0] * 3
        try:
            made = self.fn.warmup(*args, **{**meta, **config.all_kwargs()})
        except Exception:  # tuning meets it too, and leaves this configuration out
            return [float("inf")] * 3
        return [float("inf") if made.metadata.shared > SHARED else 1.0 + bool(place)] * 3

    Autotuner._bench = bench


def part(model: str) -> None:
    """One training step and one prompt of one layer."""
    import torch
    from random_models import config_of
    from training_step import fla_model

    if model.startswith("patched "):
        import patched_fla

        made, size = patched_fla.model_of(model.removeprefix("patched "), 1), patched_fla.V
    else:
        config = config_of(model, num_layers=2)  # the second layer of RWKV-7 mixes values
        with torch.device("meta"):
            made, size = fla_model(model, config), config.vocab_size
        made = made.to_empty(device="cuda")
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    made = made.cuda().to(torch.bfloat16)
    ids = torch.randint(size, (1, 2048), device="cuda")
    made(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        made(input_ids=ids, logits_to_keep=1)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        tune_nothing(given.rank, given.processes)
        for model in given.models:
            part(model)
        return
    begin = time.perf_counter()
    command = [sys.executable, __file__, *given.models, "--processes", str(given.processes), "--rank"]
    started = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(given.processes)]
    failed = []
    for one in started:
        try:
            _, errors = one.communicate(timeout=max(given.seconds - (time.perf_counter() - begin), 0.1))
            failed += [errors.strip().splitlines()[-1]] if one.returncode else []
        except subprocess.TimeoutExpired:
            one.kill()
            failed.append("stopped")
    print(f"{time.perf_counter() - begin:.0f} s, {len(failed)} of {len(started)} processes not done", *sorted(set(failed)), sep="\n  ")


if __name__ == "__main__":
    main()
