"""One process without Ray, and one and more replicas of ``penstock serve --replicas``: requests and tokens a second, times to first tokens.

    python benchmarks/replicas.py [--model PATH] [--replicas 1 --replicas 2] [--device cuda] [--clients 1 --clients 32] [--json FILE]

``--clients`` is for each replica: two replicas have twice as many clients, and so twice as many requests. Each case is a server of its own,
which ``penstock bench-serve`` loads. On GPUs, each replica has one. On a CPU each has ``--threads`` (1), and so has the process without
Ray. Without ``--model``, the model is an RWKV-6 of random weights with bytes as tokens, of ``--layers`` and ``--hidden``. Run it on an
idle machine: cases are compared within one run only.
"""

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from penstock.models import CausalLM, rwkv6, save


def made(folder, layers, hidden):
    """A checkpoint of random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "num_layers": layers, "head_size": min(64, hidden // 2)}
    save(CausalLM(rwkv6(vocab_size=257, **sizes)), folder)
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    return folder


@contextmanager
def serving(*words):
    """The address of a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "penstock", "serve", "--port", str(port), "--api-key", "secret", *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        else:
            raise SystemExit("".join(lines))
        rest = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # the log, which must not fill its pipe
        yield found[1], server.pid
        server.send_signal(signal.SIGTERM)
        server.wait(120)
        rest.wait()
    finally:
        server.kill()
        server.wait()


def used(pid):
    """Seconds of CPU: of the process that listens, and of all below it."""
    own = psutil.Process(pid)
    below = [one.cpu_times() for one in own.children(recursive=True)]
    return sum(own.cpu_times()[:2]), sum(one.user + one.system for one in below)


def measured(served, given, folder, servers):
    """What ``penstock bench-serve`` measures, for each number of clients; and milliseconds of CPU for a token."""
    url, pid = served
    found = []
    for clients in (servers * each for each in given.clients):
        numbers = folder / "numbers.json"
        words = ["--clients", str(clients), "--requests", str(given.requests * clients), "--prompt", given.prompt, "--output", given.output]
        command = [sys.executable, "-m", "penstock", "bench-serve", "--url", url, "--api-key", "secret", *words, "--json", str(numbers)]
        before = used(pid)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = json.loads(numbers.read_text())["runs"]
        own, below = (1e3 * (after - one) / run["output_tokens"] for one, after in zip(before, used(pid)))
        found.append({"clients": clients, "listening_cpu_ms": own, "other_cpu_ms": below, **run})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replicas", type=int, action="append")
    parser.add_argument("--clients", type=int, action="append", help="of each replica")
    parser.add_argument("--slots", type=int, default=64, help="of each replica")
    parser.add_argument("--requests", type=int, default=20, help="of each client")
    parser.add_argument("--prompt", default="50")
    parser.add_argument("--output", default="100")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.clients = given.clients or [1, 16]
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or made(folder / "model", given.layers, given.hidden)
        words = [
            "--model",
            str(model),
            "--name",
            "model",
            "--device",
            given.device,
            "--slots",
            str(given.slots),
            "--threads",
            str(given.threads),
        ]
        for count in [None, *(given.replicas or [1, 2])]:
            case = "one process" if count is None else f"{count} replica{'s' if count > 1 else ''}"
            with serving(*words, *([] if count is None else ["--replicas", str(count)])) as served:
                few = argparse.Namespace(**{**vars(given), "clients": given.clients[-1:], "requests": 2})
                measured(served, few, folder, count or 1)  # first requests take longer
                results[case] = measured(served, given, folder, count or 1)
            for one in results[case]:
                first, between = one["first"], one["between"]
                print(
                    f"{case:12} {one['clients']:4} clients {one['requests'] / one['seconds']:8.1f} requests/s "
                    f"{one['output_tokens'] / one['seconds']:9.0f} tokens/s   first token p50 {first['p50'] * 1e3:7.1f} "
                    f"p99 {first['p99'] * 1e3:7.1f} ms   between p50 {between['p50'] * 1e3:6.2f} p99 {between['p99'] * 1e3:6.2f} ms   "
                    f"CPU of a token {one['listening_cpu_ms']:.3f} + {one['other_cpu_ms']:.3f} ms",
                    flush=True,
                )
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        machine["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    content = {"machine": machine, "options": {**vars(given), "model": given.model and str(given.model), "json": None}, "cases": results}
    if given.json is not None:
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    else:
        print(json.dumps(content))


if __name__ == "__main__":
    main()
