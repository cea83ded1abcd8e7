"""Time to the first token of turn n of one conversation: /v1/responses beside /v1/chat/completions.

    python benchmarks/responses.py [--turns 200] [--json FILE] [--plot FILE]

Servers run in this process, with a small RWKV-6 of random weights and bytes as tokens, on the CPU. Each turn has a new message of
``--message`` bytes and at most ``--answer`` tokens. Chats send all messages each time: to a server whose cache of prefixes has the turn
before, and, at every ``--every``-th turn, to one without a cache, as another replica is. Responses send the new message: to two servers of
one folder of states in turn. Times are from the request to the first piece of text, in milliseconds: of the clock, and of CPUs for this
process, client and server together, which other processes of the machine change less.
"""

import argparse
import json
import socket
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import openai
import torch

from penstock.bench import figure
from penstock.engine import Engine
from penstock.models import CausalLM, rwkv6
from penstock.models.tokenizers import Bytes
from penstock.server.limits import Limits
from penstock.server.run import make_server
from penstock.server.service import Service
from penstock.server.templates import WorldTemplate

COLOURS = {"responses": figure.OURS, "chat, cached": "#e69f00", "chat, not cached": "#d55e00"}


@contextmanager
def serving(model, **options):
    """A client of a server."""
    folder = options.pop("states_folder", None)
    limits = Limits(prompt_tokens=2**20, messages=4096)
    service = Service(Engine(model, Bytes(257), slots=4, **options), "model", WorldTemplate(), limits, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = make_server(service, port=port, log_level="warning")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def message(turn, size):
    """A new one for each turn."""
    return f"Message {turn}: ".ljust(size, "abcdefghij"[turn % 10])


def clocks():
    """Milliseconds of the clock and of CPUs."""
    return time.perf_counter() * 1e3, time.process_time() * 1e3


def since(began):
    """Milliseconds since then, likewise."""
    return [now - then for now, then in zip(clocks(), began)]


def chat(client, messages, answer):
    """The times to the first token, and the text."""
    began, first, text = clocks(), None, ""
    for piece in client.chat.completions.create(model="model", messages=messages, max_tokens=answer, stream=True, seed=1):
        if piece.choices and piece.choices[0].delta.content is not None and first is None and (text or piece.choices[0].delta.content):
            first = since(began)
        text += (piece.choices[0].delta.content or "") if piece.choices else ""
    return first or since(began), text


def respond(client, text, previous, answer):
    """The times to the first token, and the response."""
    began, first = clocks(), None
    for event in client.responses.create(model="model", input=text, previous_response_id=previous, max_output_tokens=answer, stream=True):
        if event.type == "response.output_text.delta" and first is None:
            first = since(began)
    return first or since(began), event.response


def measure(given):
    """Of each way: turns, milliseconds of the clock, milliseconds of CPUs."""
    torch.manual_seed(0)
    model = CausalLM(rwkv6(vocab_size=257, hidden_size=given.hidden, num_layers=given.layers, head_size=32)).eval()
    times = {name: [] for name in COLOURS}
    with tempfile.TemporaryDirectory() as folder, serving(model, states_folder=Path(folder)) as one, serving(
        model, states_folder=Path(folder)
    ) as other:  # fmt: skip
        previous = None
        for turn in range(1, given.turns + 1):
            spent, found = respond((one, other)[turn % 2], message(turn, given.message), previous, given.answer)
            times["responses"].append((turn, *spent))
            previous = found.id
        tokens = found.usage.total_tokens
    with serving(model) as cached, serving(model, cache_bytes=0) as plain:
        messages = []
        for turn in range(1, given.turns + 1):
            messages.append({"role": "user", "content": message(turn, given.message)})
            if turn == 1 or turn % given.every == 0:
                times["chat, not cached"].append((turn, *chat(plain, messages, given.answer)[0]))
            spent, text = chat(cached, messages, given.answer)
            times["chat, cached"].append((turn, *spent))
            messages.append({"role": "assistant", "content": text})
    return times, tokens


def plot(times, path, below):
    """A line for each way."""
    shown = figure.new_figure(7, 4)
    axes = shown.add_subplot()
    for name, points in times.items():
        marker = "o" if len(points) < 50 else None
        turns, _, spent = zip(*points)
        axes.plot(turns, spent, color=COLOURS[name], label=name, linewidth=1.5, marker=marker, markersize=4)
    axes.set_yscale("log")
    axes.set_xlabel("turn")
    axes.set_ylabel("CPU time, ms")
    figure.grid(axes, "y")
    axes.legend(frameon=False, fontsize=9)
    figure.write_title(axes, "CPU time to the first token of a turn", below)
    figure.save(shown, path, "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"turns": 200, "message": 200, "answer": 16, "every": 20, "hidden": 128, "layers": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    times, tokens = measure(given)
    print(f"medians of the first and the last tenth of the turns, ms; {tokens} tokens at the end")
    print(f"{'':18} {'clock':>19} {'CPUs':>19}")
    for name, points in times.items():
        tenth = max(1, len(points) // 10)
        found = [statistics.median(one[place] for one in part) for place in (1, 2) for part in (points[:tenth], points[-tenth:])]
        print(f"{name:18} " + " ".join(f"{one:9.1f}" for one in found))
    if given.json is not None:
        about = {name: getattr(given, name) for name in ("turns", "message", "answer", "hidden", "layers")}
        given.json.write_text(json.dumps({**about, "threads": torch.get_num_threads(), "tokens": tokens, "times": times}, indent=1))
    if given.plot is not None:
        plot(times, given.plot, f"RWKV-6, {given.layers} layers, C = {given.hidden}, float32, CPU; messages of {given.message} bytes")


if __name__ == "__main__":
    main()
