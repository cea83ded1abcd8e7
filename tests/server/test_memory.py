"""Resident memory of a server, with a vocabulary of 65,536 and many kinds of requests."""

import asyncio
import os
import random
import re
import subprocess
import sys

import pytest
from live_server import process, sent

from penstock.server import memory

pytest.importorskip("pyrwkv_tokenizer")
VOCAB = 65536
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
MORE = {
    "plain": {}, "greedy": {"temperature": 0}, "top": {"top_k": 2000, "top_p": 0.9}, "nucleus": {"top_p": 0.5},
    "penalties": {"presence_penalty": 0.5, "logit_bias": {"5": 2}, "min_p": 0.01}, "logprobs": {"logprobs": 20},
    "echo": {"logprobs": 5, "echo": True}, "grammar": FORMAT, "several": {"n": 4}, "stream": {"stream": True, "max_tokens": 12},
    "state": {"save_state": True}, "leaves": {"max_tokens": 200, "stream": True},
    "chat": {"logprobs": True, "top_logprobs": 3}, "stream of a chat": {"stream": True},
}  # fmt: skip


def save_model(folder):
    import torch

    from penstock.models import CausalLM, rwkv6, save

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 1, "intermediate_size": 32, "head_size": 8, "mix_rank": 2, "decay_rank": 2}
    save(CausalLM(rwkv6(vocab_size=VOCAB, **sizes)), folder)


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024


def request(name, rng):
    words = " ".join(rng.choice(["sea", "wind", "ship", f"x{rng.randrange(1000)}"]) for _ in range(rng.randrange(1, 60)))
    body = {"model": "tiny", "max_tokens": rng.randrange(1, 6), "seed": rng.randrange(2**31), "ignore_eos": True, **MORE[name]}
    if "chat" in name:
        return sent({**body, "messages": [{"role": "user", "content": words}]}, "/v1/chat/completions", "Connection: close\r\n")
    return sent({**body, "prompt": words}, headers="Connection: close\r\n")


async def load(port, count, rng):
    """So many requests of all kinds, by 16 clients."""
    left = [count]

    async def client():
        while left[0] > 0:
            left[0] -= 1
            name = rng.choice(list(MORE))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(name, rng))
            if name == "leaves":
                await asyncio.sleep(rng.random() * 0.2)
            else:
                content = await reader.read()
                assert content.startswith(b"HTTP/1.1 200"), content[:500]
            writer.close()

    await asyncio.gather(*(client() for _ in range(16)))


def grown(folder, counts):
    """Megabytes above those of a server that begins, after so many requests each time."""
    save_model(folder)
    words = ("--name", "tiny", "--threads", "1", "--cache", "16", "--max-states", "8")
    with process(folder, *words) as (server, url, _):
        rng, port, begin = random.Random(0), int(url.rpartition(":")[2]), resident(server.pid)
        found = []
        for count in counts:
            asyncio.run(load(port, count, rng))
            found.append(resident(server.pid) - begin)
    return found


@pytest.mark.slow
def test_resident_memory_stays_low(tmp_path):
    """It grew by 150 MB in so many requests."""
    (found,) = grown(tmp_path / "model", [300])
    assert found < 110


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_resident_memory_stays_flat(tmp_path):
    """It grew by 60 MB in a thousand requests, without an end."""
    found = grown(tmp_path / "model", [1000] * 4)
    assert found[-1] - found[0] < 30, found


CODE = """
import torch, threading
from penstock.server import memory
{call}
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def work(n):
    kept = []
    for size in range(40):
        x = torch.zeros(16 * 65536 + size * n, dtype=torch.float64)
        y = x + 1
        kept.append(torch.zeros(2**15))
        del x, y
    return kept
torch.set_num_threads(1)
torch.zeros(16, 65536, dtype=torch.float64)
begin = resident()
found = []
threads = [threading.Thread(target=lambda n=n: found.append(work(n))) for n in range(8)]
for one in threads: one.start()
for one in threads: one.join()
del found[:]
print(resident() - begin)
"""


def left(call):
    """Megabytes that temporaries of eight threads leave."""
    words = [sys.executable, "-c", CODE.format(call=call)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not memory.keep_flat(), reason="needs glibc")
def test_large_temporaries_of_threads_go_back_to_the_system():
    assert left("assert memory.keep_flat()") < 60 < 200 < left("")


@pytest.mark.parametrize("name", memory.SETTINGS)
def test_who_sets_up_memory_otherwise_keeps_that(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not memory.keep_flat()
