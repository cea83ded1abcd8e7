"""A small random model served over HTTP, in a thread or in a process of its own."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import openai
import pytest
import torch
from architectures import randomised

from penstock.engine import Engine
from penstock.models import CausalLM, rwkv6, save
from penstock.models.tokenizers import Bytes
from penstock.server.run import make_server
from penstock.server.service import Service
from penstock.server.templates import WorldTemplate

VOCAB = 257
KEY = "secret"


def small_model():
    """Of bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 1, "intermediate_size": 32, "head_size": 8, "mix_rank": 2, "decay_rank": 2}
    model = CausalLM(rwkv6(vocab_size=VOCAB, **sizes)).eval()
    randomised(model)
    return model


def sent(body, path="/v1/completions", headers=""):
    """Bytes of an HTTP request."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


class Live:
    """A server that runs."""

    def __init__(self, service, server, port):
        self.service, self.server, self.engine = service, server, service.engine
        self.thread = None
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def connect(self):
        """A plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    @contextmanager
    def refuses(self, message):
        """A request of OpenAI's client gets status 400 and an error with this text, and nothing of it runs."""
        with pytest.raises(openai.BadRequestError) as caught:
            yield
        assert message in caught.value.body["message"]
        assert len(caught.value.body["message"]) < 400
        self.settles()

    def reaches(self, condition, seconds=100):
        """Wait until a condition holds, as long as a busy machine takes."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def settles(self):
        """Nothing runs or waits any more, and no slot is lost."""
        for _ in range(1000):
            stats = self.engine.stats
            if stats.running == stats.waiting == 0 and not self.service.running:
                break
            time.sleep(0.01)
        assert (self.engine.stats.running, self.engine.stats.waiting, len(self.service.running)) == (0, 0, 0)
        self.engine.check_integrity()


@contextmanager
def running(
    model,
    limits=None,
    template=WorldTemplate(),  # noqa: B008
    api_key=None,
    drain_seconds=5,
    states_folder=None,
    keys=None,
    origins=(),
    tracing=None,
    hosts=(),
    tokenizer=None,
    **options,
):
    engine = Engine(model, tokenizer or Bytes(VOCAB), **{"slots": 4, "token_budget": 256, **options})
    service = Service(engine, "tiny", template, limits, states_folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"api_key": api_key, "keys": keys, "origins": origins, "drain_seconds": drain_seconds, "tracing": tracing, "hosts": hosts}
    server = make_server(service, port=port, **given, log_level="warning")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    live = Live(service, server, port)
    live.thread = thread
    try:
        yield live
    finally:
        live.client.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def save_checkpoint(folder):
    """Of the small model, with a template."""
    save(small_model(), folder)
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")


@contextmanager
def process(checkpoint, *words, port=0):
    """``penstock serve`` of a checkpoint: the process, its address, and the lines that it prints."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", str(checkpoint), "--device", "cpu", "--port", str(port), *words]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines, found = [], None
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"running on (http://\S+)", line):
            break
    rest = threading.Thread(target=lambda: lines.extend(server.stderr))
    rest.start()
    try:
        assert found, lines
        yield server, found[1], lines
    finally:
        server.kill()
        server.wait()
        rest.join()
        server.stderr.close()
