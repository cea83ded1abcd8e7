"""Compiles what fla's tuning tries, by processes side by side: without it the first step of a model takes fla two minutes and more.

    python benchmarks/compile_fla.py gla "patched rwkv7" [--processes 15] [--seconds 90]

Each process calls a few layers of a model of ``training_step.py`` or of ``patched_fla.py`` ("patched ..."), forward and backward, and
compiles its share of the kernels and configurations into Triton's cache. No kernel runs: tuning comes later, alone on the GPU.
"""

import argparse
import subprocess
import sys
import time
from contextlib import suppress
from zlib import crc32


def compile_share(rank: int, processes: int) -> None:
    """Let Triton compile every ``processes``-th kernel and launch none."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    compiled = JITFunction.run

    def ours(name: str, place: int) -> bool:
        return (crc32(name.encode()) + place) % processes == rank

    def run(self, *args, grid, warmup, **options):
        if warmup or ours(self.__name__, 0):
            compiled(self, *args, grid=grid, warmup=True, **options)

    def tuned(self, *args, **options):
        self.nargs = dict(zip(self.arg_names, args))
        for place, config in enumerate(self.prune_configs(options)):
            if ours(self.base_fn.__name__, place):
                with suppress(Exception):  # tuning meets it, too, and leaves this configuration out
                    self.fn.run(*args, **{**options, "warmup": True}, **config.all_kwargs())
        self.nargs = None

    JITFunction.run, Autotuner.run = run, tuned


def part(model: str) -> None:
    """One training step and one prompt of two layers: the second of RWKV-7 mixes values. A size of 1 would be compiled as a constant."""
    import torch
    from fla_models import VOCABULARY, model_of_sizes, small_model
    from random_models import config_of

    if model.startswith("patched "):
        made, size = small_model(model.removeprefix("patched "), 2), VOCABULARY
    else:
        config = config_of(model, num_layers=2)
        with torch.device("meta"):
            made, size = model_of_sizes(model, config), config.vocab_size
        made = made.to_empty(device="cuda")
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    made = made.cuda().to(torch.bfloat16)
    ids = torch.randint(size, (2, 2048), device="cuda")
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
        compile_share(given.rank, given.processes)
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
