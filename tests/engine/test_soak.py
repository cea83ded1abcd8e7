"""Many requests of every kind: no memory, slot or table grows. ``SOAK_REQUESTS=1000000 pytest -s tests/engine/test_soak.py``."""

import ctypes
import gc
import os
import random
import subprocess
import sys
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from penstock.call.memory import Memory
from penstock.engine import Engine, SamplingParams
from penstock.engine.request import Request
from penstock.models import CausalLM, rwkv6
from penstock.models.tokenizers import Bytes
from penstock.recurrence.operators import ADVANCE

COUNT = int(os.environ.get("SOAK_REQUESTS", "20000"))
SLOTS, WAITING, V = 256, 512, 256
SHARED = [7] * 64
"""What some prompts begin with: hits of the cache."""
KINDS = [
    *[SamplingParams(max_tokens=n, temperature=0) for n in (1, 2, 3)] * 4,
    SamplingParams(max_tokens=2, n=2),
    SamplingParams(max_tokens=3, seed=1, top_p=0.5, stop=tuple("abcdefghijkl"), logprobs=2),
    SamplingParams(max_tokens=2, keep_state=True, repetition_penalty=1.1),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
]


class Refused(Exception):
    """What a sink raises."""


def refusing(request, event):
    raise Refused


class MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


def allocated() -> float:
    """MiB that malloc has given out: without its free blocks, whose number depends on the order of sizes, and without cached calls."""
    ADVANCE.memory = Memory()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    gc.collect()
    info = mallinfo()
    return (info.uordblks + info.hblkhd) / 2**20


def resident() -> float:
    """MiB of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def objects() -> Counter:
    """Tensors, and objects of the engine, by type. Others grow with the bounded caches of calls."""
    gc.collect()
    types = (type(one) for one in gc.get_objects())
    return Counter(kind.__name__ for kind in types if kind is torch.Tensor or str(kind.__module__).startswith("penstock.engine"))


class Soak:
    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": V, "hidden_size": 16, "num_layers": 1, "head_size": 8, "intermediate_size": 16}
        model = CausalLM(rwkv6(**sizes, mix_rank=4, decay_rank=4)).eval()
        self.engine = Engine(
            model, Bytes(), slots=SLOTS, token_budget=2048, cache_bytes=2**16, host_cache_bytes=2**16, max_queue=2 * WAITING
        )
        self.rng, self.submitted, self.ends = random.Random(0), 0, Counter()

    def submit(self) -> Request:
        """The next request."""
        number, self.submitted = self.submitted, self.submitted + 1
        prompt = [self.rng.randrange(V) for _ in range(1 + number % 3)]
        if number % 23 == 0:
            prompt = SHARED + prompt
        elif number % 29 == 0:
            prompt = prompt * 64  # a prefix of this request alone
        params = KINDS[number % len(KINDS)]
        options = {"priority": int(number % 101 == 0), "sink": refusing if number % 97 == 0 and number % 53 and params.max_tokens else None}
        request = self.engine.submit(prompt, params, **options)
        if number % 53 == 0:
            self.engine.cancel(request)
        return request

    def run(self, count: int) -> None:
        """Run some requests to their ends, and some that continue from kept states."""
        goal, running = self.submitted + count, []
        while self.submitted < goal or running:
            while self.submitted < goal and self.engine.waiting < WAITING:
                running.append(self.submit())
            self.engine.step()
            left = []
            for request in running:
                if request.done:
                    for completion in request.result.completions:
                        self.ends[completion.finish_reason] += 1
                        state = completion.state
                        if state is not None and self.rng.random() < 0.2 and self.submitted < goal:
                            self.submitted += 1
                            left.append(self.engine.submit([1], SamplingParams(max_tokens=1), state=state))
                else:
                    left.append(request)
            running = left


def main() -> None:
    soak = Soak()
    soak.run(max(COUNT // 10, 5000))
    before, memory, pages = objects(), allocated(), resident()
    for _ in range(10):
        begin = time.process_time()
        soak.run(COUNT // 10)
        rate = COUNT // 10 / (time.process_time() - begin)
        print(f"{soak.submitted} requests, {allocated():.2f} MiB, {resident():.1f} resident, {rate:.0f} a second")
    last = weakref.ref(soak.engine.submit([1], SamplingParams(max_tokens=1)))
    soak.run(1)
    after = objects()
    print(f"{memory:.2f} MiB before, {allocated():.2f} after, {pages:.1f} and {resident():.1f} resident")
    print(soak.ends, soak.engine.stats)
    assert last() is None
    assert allocated() - memory < 0.5
    assert sum((after - before).values()) < 20, after - before  # nodes of the cache
    assert set(soak.ends) == {"length", "stop", "cancelled", "error"}
    engine = soak.engine
    engine.check_integrity()
    steps = engine._steps
    assert not steps.requests
    assert not steps.scheduler.running
    assert engine.waiting == 0
    assert len(steps.scheduler.shares) == 0
    assert engine._cache.bytes == sum(one.state.nbytes for one in engine._cache._entries if not one.on_host) <= engine._cache.budget
    assert engine._cache.host_bytes == sum(one.state.nbytes for one in engine._cache._entries if one.on_host) <= engine._cache.host_budget
    assert engine.stats.cache.hits > 0
    assert engine.stats.cache.evictions > 0
    assert not engine._mailboxes.pending


@pytest.mark.slow
@pytest.mark.timeout(0 if COUNT > 20_000 else 300)
def test_many_requests_leave_nothing_behind():
    """In a process of its own: the heap that other tests leave grows by the order of what fills it."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, __file__], cwd=root, env={**os.environ, "PYTHONPATH": str(root), "PYTHONMALLOC": "malloc"}, check=True)


if __name__ == "__main__":
    main()
