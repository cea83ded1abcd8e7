"""The time of a small request beside large ones of another key, as a multiple of its time alone: `penstock serve` on a CPU.

    python benchmarks/small_request.py [--kinds NAME ...] [--requests 15] [--server-cores 0,1] [--client-cores 2-5] [--json FILE]
    python benchmarks/small_request.py --cost

A small RWKV-6 of random weights and bytes as tokens. The server, with a thread for each of its cores, and the clients of the large requests
are processes of their own. The small request is a completion of 20 tokens, one after the other, for 25 s at most; before each kind it runs
alone. The sizes of large requests are within the server's limits, but for one kind. Each client asks again as soon as it is answered;
clients that do not read take 200 bytes of a stream every 0.3 s.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

KEYS = {"small": "small-secret", "hog": "hog-secret"}
SMALL = {"prompt": "hello you", "max_tokens": 20, "temperature": 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RANDOM = random.Random(0)


def tokens(count):
    return [RANDOM.randrange(1, 250) for _ in range(count)]


def schema(n):
    names = [f"p{n}_{k}" for k in range(120)]
    properties = {name: {"type": "string", "pattern": f"(a|b|c|d){{1,{k + 20}}}x{{2,40}}"} for k, name in enumerate(names)}
    given = {"type": "object", "properties": properties, "required": names}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": given}}


def function(k):
    return {"type": "function", "function": {"name": f"f{k}", "parameters": {"properties": {"a": {"enum": [f"e{j}" for j in range(30)]}}}}}


def said(text):
    return [{"role": "user", "content": text}]


SLOW = "clients that do not read"
TOOLS = [function(k) for k in range(100)]
ECHO = {"prompt": "x" * 20_000, "echo": True, "logprobs": 5, "n": 4, "max_tokens": 5, "stream": True}
HOGS = {
    "prompt_logprobs of 9,000 tokens": (4, COMPLETIONS, lambda n: {"prompt": tokens(9000), "prompt_logprobs": 20, "max_tokens": 1}),
    "echo, logprobs, n 16": (4, COMPLETIONS, lambda n: {"prompt": f"xy{n}" * 600, "echo": True, "logprobs": 5, "n": 16, "max_tokens": 30}),
    "stream of an echo": (4, COMPLETIONS, lambda n: ECHO),
    SLOW: (20, COMPLETIONS, lambda n: ECHO),
    "JSON of 4 MB": (4, COMPLETIONS, lambda n: {"prompt": "a", "metadata": {str(k): "v" for k in range(200_000)}}),
    "tokens, JSON of 2 MB": (3, COMPLETIONS, lambda n: {"prompt": [[97] * 8000] * 64, "max_tokens": 0, "echo": True}),
    "texts of MB to /tokenize": (4, "/tokenize", lambda n: {"prompt": "x yz" * 900_000, "return_token_strs": True}),
    "chats that are too long": (4, CHAT, lambda n: {"messages": said(f"{n:04}" * 90) * 1000, "max_tokens": 1}),
    "64 prompts, n 16": (2, COMPLETIONS, lambda n: {"prompt": [f"a{n}"] * 64, "n": 16, "max_tokens": 200}),
    "prompts of 8,000 tokens": (3, COMPLETIONS, lambda n: {"prompt": [tokens(8000) for _ in range(16)], "max_tokens": 20}),
    "large schemas": (6, COMPLETIONS, lambda n: {"prompt": "a", "response_format": schema(n), "max_tokens": 300}),
    "tools": (
        4,
        CHAT,
        lambda n: {"messages": said("a"), "tools": [*map(function, range(100))], "tool_choice": "required", "max_tokens": 300},
    ),
}
"""Clients, the path, and the n-th request of each."""


def http(path, body, key):
    content = json.dumps({"model": "model", "ignore_eos": True, **body} if path == COMPLETIONS else {"model": "model", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEYS[key]}\r\n"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content


def hog(port, name, client):
    """One client of large requests, in a thread."""
    _, path, make = HOGS[name]
    requests, buffer = [http(path, make(1000 * client + n), "hog") for n in range(3)], bytearray(2**18)
    slow, count = name == SLOW, 0
    while True:
        with suppress(OSError), socket.socket() as one:
            if slow:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(("127.0.0.1", port))
            one.sendall(requests[count % 3])
            status = one.recv(12)
            while one.recv_into(buffer, 200 if slow else len(buffer)):
                time.sleep(0.3 * slow)
            count += 1
            print(status.decode().split()[-1], flush=True)


def hogs(port, name):
    for client in range(HOGS[name][0]):
        threading.Thread(target=hog, args=(port, name, client), daemon=True).start()
    print(flush=True)
    signal.pause()


async def small(port):
    """Seconds of a small request."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http(COMPLETIONS, SMALL, "small"))
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    return time.perf_counter() - begin


def measured(port, name, wanted, client_cores):
    alone = [asyncio.run(small(port)) for _ in range(wanted)]
    words = [sys.executable, __file__, "--hog", name, "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: on(client_cores)) as other:
        try:
            other.stdout.readline()
            time.sleep(3)
            beside, begin = [], time.perf_counter()
            while len(beside) < wanted and time.perf_counter() - begin < 25:
                beside.append(asyncio.run(small(port)))
        finally:
            other.kill()
        statuses = other.stdout.read().split()
    found = {
        "kind": name,
        "alone": statistics.median(alone),
        "beside": statistics.median(beside),
        "most": max(beside),
        "count": len(beside),
    }
    found |= {"count": len(beside), "large": {status: statuses.count(status) for status in sorted({*statuses})}, "load": os.getloadavg()[0]}
    ratio = found["beside"] / found["alone"]
    print(
        f"| {name} | {found['alone']:.3f} | {found['beside']:.3f} | {ratio:.2f} | {found['most'] / found['alone']:.2f} | {len(beside)} | "
        f"{found['large']} | {found['load']:.1f} |", flush=True,
    )  # fmt: skip
    time.sleep(3)
    return found


def on(cores):
    os.sched_setaffinity(0, cores)


def listed(text):
    """Cores such as 0,1 or 2-5."""
    ends = [part.partition("-") for part in text.split(",")]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}


def cost(pid, port, name):
    """CPU seconds of the server's own process for one large request, whose answer is read at once. Worker processes do not count."""
    _, path, make = HOGS[name]
    found, statuses = [], []
    for n in range(6):
        content, buffer, begin = http(path, make(n), "hog"), bytearray(2**18), used(pid)
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(content)
            statuses.append(one.recv(12).decode().split()[-1])
            while one.recv_into(buffer):
                pass
        found.append(used(pid) - begin)
    seconds = statistics.median(found[1:])  # the first request of a kind warms up
    print(f"| {name} | {seconds:.3f} | {statuses[-1]} |", flush=True)
    return {"kind": name, "cpu": seconds}


def used(pid):
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(cores):
    """A server on these cores: its process and port."""
    import torch  # not in the clients of large requests: that takes seconds

    from penstock.models import CausalLM, rwkv6, save

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path, threads = Path(folder), str(len(cores))
        save(CausalLM(rwkv6(vocab_size=257, hidden_size=24, num_layers=2, head_size=8)).eval(), path / "model")
        (path / "model" / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}{{ tools }}")
        (path / "keys").write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "penstock", "serve", "--model", str(path / "model"), "--port", str(port), "--device", "cpu"]
        words += ["--api-key-file", str(path / "keys"), "--slots", "16", "--threads", threads, "--tool-parser", "hermes"]
        with open(path / "log", "w+") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": threads}
            server = subprocess.Popen(words, stderr=log, env=environment, preexec_fn=lambda: on(cores))
            try:
                while "running on" not in (path / "log").read_text():
                    assert server.poll() is None, (path / "log").read_text()
                    time.sleep(0.1)
                for _ in range(5):
                    asyncio.run(small(port))
                time.sleep(8)  # worker processes have started
                yield server, port
            finally:
                server.terminate()
                server.wait(60)
            log.seek(0)
            print("\nerrors in the server's log:", log.read().count("Traceback"))


def main():
    mine = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(HOGS), choices=list(HOGS), metavar="NAME")
    parser.add_argument("--requests", type=int, default=15)
    parser.add_argument("--cost", action="store_true", help="CPU time of the server's own process for a large request, instead")
    parser.add_argument("--server-cores", type=listed, default={*mine[:2]})
    parser.add_argument("--client-cores", type=listed, default={*(mine[2:6] or mine)})
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hog", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hog:
        hogs(given.port, given.hog)
    with serving(given.server_cores) as (server, port):
        print(f"server on {sorted(given.server_cores)}, clients of large requests on {sorted(given.client_cores)}\n")
        if given.cost:
            print("| one of | CPU of the server's own process, s | status |\n| --- | ---: | --- |", flush=True)
            found = [cost(server.pid, port, name) for name in given.kinds if name != SLOW]
        else:
            print("| beside | alone, s | beside, s | ratio | largest | requests | large | load |")
            print("| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |", flush=True)
            found = [measured(port, name, given.requests, given.client_cores) for name in given.kinds]
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
