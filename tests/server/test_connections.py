"""Clients that do not read, do not finish or do not leave: what they hold is bounded, and so is the end of the server."""

import json
import resource
import signal
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
from live_server import process, running, save_checkpoint, sent

from penstock.server import connection, streaming
from penstock.server.limits import Limits
from penstock.server.quotas import Quota

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "a", "max_tokens": 5, "ignore_eos": True}
LARGE = {"model": "tiny", "prompt": "a" * 30_000, "max_tokens": 0, "echo": True, "logprobs": 3, "n": 2}
GET = "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n"
STATE = f"state-1-{0:032}"
UNREAD = {
    "whole": sent(LARGE),
    "stream": sent({**LARGE, "stream": True}),
    "chat": sent({"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}, "/v1/chat/completions") * 300,
    "error": sent({"model": "tiny", "prompt": "a", "n": 0}) * 300,
    "metrics": GET.format("/metrics").encode() * 300,
    "health": GET.format("/health").encode() * 2000,
    "page": GET.format("/page.js").encode() * 300,
    "models": GET.format("/v1/models").encode() * 2000,
    "states": GET.format("/v1/states").encode() * 2000,
    "state": GET.format(f"/v1/states/{STATE}").encode(),
}


@pytest.fixture
def narrow_server(monkeypatch):
    """The system's buffers of the server's connections are small: what is not read is left with the server."""
    plain = connection.Connection.connection_made

    def made(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        plain(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", made)


def narrow(live):
    """A connection that takes few bytes unread."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(60)
    one.connect(("127.0.0.1", live.port))
    return one


def send(one, content):
    """Send in a thread: the server stops reading."""

    def run():
        with suppress(OSError):
            one.sendall(content)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.usefixtures("narrow_server")
def test_a_client_that_does_not_read_is_dropped_after_a_time(model, monkeypatch, tmp_path, name):
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 1)
    left, check = [], connection.Connection._check_reading

    def checked(self):
        left.append(self.transport.get_write_buffer_size())
        check(self)

    monkeypatch.setattr(connection.Connection, "_check_reading", checked)
    with running(model, Limits(), states_folder=tmp_path) as live:
        monkeypatch.setattr(live.service.states, "content", lambda _: bytes(30_000_000))
        silent = narrow(live)
        send(silent, UNREAD[name])
        live.reaches(lambda: any(left))
        live.reaches(lambda: not live.server.server_state.connections)
        assert max(left) < 2**19, "an answer is copied to its connection as far as it is read"
        silent.close()
        live.settles()
        assert httpx.get(f"{live.url}/health").status_code == 200


@pytest.mark.usefixtures("narrow_server")
def test_a_client_that_does_not_read_keeps_no_slot_and_is_dropped_after_a_time(model, monkeypatch):
    monkeypatch.setattr(streaming, "LAST_SECONDS", 0.5)
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 1)
    with running(model, Limits(seconds=0.5), slots=4) as live, narrow(live) as silent:
        silent.sendall(sent({**LONG, "stream": True, "n": 4, "logprobs": 20}))
        live.reaches(lambda: live.engine.stats.generated_tokens > 0)
        live.service.limits = Limits()
        assert httpx.post(f"{live.url}/v1/completions", json=SHORT, timeout=60).json()["usage"]["completion_tokens"] == 5
        live.settles()
        live.reaches(lambda: not live.server.server_state.connections)
        assert live.engine.stats.generated_tokens < LONG["max_tokens"]


def test_a_client_that_reads_slowly_but_steadily_gets_its_answer(model, monkeypatch, tmp_path):
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.5)
    with running(model, states_folder=tmp_path) as live:
        monkeypatch.setattr(live.service.states, "content", lambda _: bytes(20_000_000))
        with live.connect() as slow:
            slow.sendall(UNREAD["state"])
            size, began = 0, time.monotonic()
            while size < 20_000_000:
                size += len(slow.recv(200_000))
                time.sleep(0.02)
        assert time.monotonic() - began > 0.6


BOTH = sent(SHORT, headers="Transfer-Encoding: chunked\r\n")
FRAMINGS = {
    "length": BOTH,
    "chunks": BOTH.partition(b"\r\n\r\n")[0] + b"\r\n\r\n0\r\n\r\n" + GET.format("/health").encode(),
    "lengths": sent(SHORT, headers="Content-Length: 3\r\n"),
    "other encoding": sent(SHORT).replace(b"Content-Length", b"Transfer-Encoding"),
    "encodings": BOTH.replace(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"),
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/states", "/health", "/none"])
@pytest.mark.parametrize("name", FRAMINGS)
def test_a_body_with_two_ends_is_refused_and_the_connection_closed(live, client, name, path):
    with live.connect() as one:
        one.sendall(FRAMINGS[name].replace(b"/v1/completions", path.encode()))
        content = b"".join(iter(lambda: one.recv(4096), b""))
    head, _, body = content.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert content.count(b"HTTP/1.1") == 1


# the end

HELD = {
    "slow reader": [sent(LARGE)],
    "slow reader of a stream": [sent({**LARGE, "stream": True})],
    "half a body": [sent(SHORT)[:-5]],
    "half a state": [sent(b"aaaa", "/v1/states")[:-2]],
    "half a head": [sent(SHORT)[:30]],
    "nothing": [b""],
    "idle": [sent(SHORT)],
    "stream": [sent({**LONG, "stream": True})],
    "whole": [sent(LONG)],
    "queued": [sent({**LONG, "stream": n % 2 == 0}) for n in range(12)],
    "grammar": [sent({**SHORT, "response_format": {"type": "json_object"}})],
}


def ends(live):
    """Seconds until the server has ended."""
    began = time.monotonic()
    live.server.should_exit = True
    live.thread.join(60)
    return time.monotonic() - began


@pytest.mark.parametrize("drain_seconds", [0, 1])
@pytest.mark.parametrize("name", HELD)
def test_the_end_takes_no_longer_than_its_time_and_two_seconds(model, monkeypatch, name, drain_seconds):
    with running(model, drain_seconds=drain_seconds) as live:
        goes_on = threading.Event()
        monkeypatch.setattr(live.service.grammars, "compile", lambda *_: goes_on.wait(60))
        connections = [narrow(live) for _ in HELD[name]]
        for one, content in zip(connections, HELD[name]):
            send(one, content)
        time.sleep(0.7)
        assert ends(live) < drain_seconds + 2
        for one in connections:
            one.close()
        goes_on.set()


@pytest.mark.parametrize("name", ["half a body", "half a state", "half a head", "stream", "whole", "queued", "grammar"])
def test_what_the_end_cuts_gets_an_error(model, monkeypatch, name):
    with running(model, drain_seconds=0.3) as live:
        goes_on = threading.Event()
        monkeypatch.setattr(live.service.grammars, "compile", lambda *_: goes_on.wait(60))
        connections = [live.connect() for _ in HELD[name]]
        for one, content in zip(connections, HELD[name]):
            one.sendall(content)
        time.sleep(0.3)
        ends(live)
        for one in connections:
            content = b"".join(iter(lambda one=one: one.recv(2**16), b""))
            assert b'"code":"shutting_down"' in content, content[-300:]
            assert content.startswith(b"HTTP/1.1 503 ") or b"text/event-stream" in content
            one.close()
        goes_on.set()


def test_a_request_that_waits_for_its_quota_while_the_server_ends_is_refused(model, monkeypatch):
    reserve = Quota.reserve

    async def late(*given):
        await reserve(*given)
        live.service.abort()

    monkeypatch.setattr(Quota, "reserve", late)
    with running(model) as live, live.connect() as one:
        monkeypatch.setattr(live.engine, "submit", None)  # nothing of it may come so far
        one.sendall(sent(LONG))
        content = b"".join(iter(lambda: one.recv(2**16), b""))
        assert content.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"shutting_down"' in content


@pytest.mark.parametrize("first", [b"", GET.format("/health").encode(), sent(SHORT)], ids=["new", "after a get", "after a post"])
@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/metrics", "/"])
def test_a_request_on_an_open_connection_is_answered_during_the_end(model, first, path):
    with running(model, drain_seconds=10) as live, live.connect() as busy, live.connect() as one:
        busy.sendall(sent({**LONG, "stream": True}))
        one.sendall(first)
        time.sleep(0.3)
        if first:
            assert b"HTTP/1.1 200" in one.recv(2**16)
        live.server.should_exit = True
        time.sleep(0.5)
        one.sendall(sent(SHORT) if path == "/v1/completions" else GET.format(path).encode())
        content = b"".join(iter(lambda: one.recv(2**16), b""))
        assert content.startswith(b"HTTP/1.1 503 " if path == "/health" else b"HTTP/1.1 200 ")
        assert b"connection: close" in content.lower()


def test_sigterm_ends_a_process_with_all_of_these(tmp_path):
    save_checkpoint(tmp_path / "model")
    patterns = {"type": "object", "patternProperties": {f"^a{n}[a-z]{{1,9}}x{n}$": {"type": "string"} for n in range(128)}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": [patterns] * 3}}}
    with process(tmp_path / "model", "--drain-seconds", "1", "--name", "tiny", "--max-tokens", "4096") as (server, url, _):
        port = int(url.rpartition(":")[2])
        connections = []
        for content in [*(one for name in HELD for one in HELD[name]), *[sent({**SHORT, "response_format": schema})] * 4]:
            one = socket.create_connection(("127.0.0.1", port))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send(one, content)
            connections.append(one)
        time.sleep(1)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        assert time.monotonic() - began < 3
        for one in connections:
            one.close()


@pytest.mark.slow
def test_a_second_interrupt_ends_what_runs(tmp_path, monkeypatch):
    """With an error, and without leaving anything."""
    save_checkpoint(tmp_path / "model")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with process(tmp_path / "model", "--drain-seconds", "60", "--name", "tiny", "--max-tokens", "100000") as (server, url, lines):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as one:
            one.sendall(sent({**LONG, "max_tokens": 100_000, "stream": True}))
            assert b"HTTP/1.1 200" in one.recv(2**16)
            server.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert server.poll() is None, "the first one waits for what runs"
            began = time.monotonic()
            server.send_signal(signal.SIGINT)
            content = b"".join(iter(lambda: one.recv(2**16), b""))
        server.wait(30)
        assert time.monotonic() - began < 2
        assert b'"code":"shutting_down"' in content
        assert server.returncode == 130
    assert not any("Traceback" in line for line in lines), lines
    assert not [*(tmp_path / "temporary").glob("penstock-*")]


def test_connections_without_requests_make_room_for_others(model, monkeypatch):
    monkeypatch.setattr(connection, "most_connections", lambda: 8)
    with running(model) as live:
        idle = [live.connect() for _ in range(20)]
        idle[-1].sendall(sent(SHORT)[:30])
        with live.connect() as one:
            one.sendall(sent(SHORT))
            assert one.recv(2**16).startswith(b"HTTP/1.1 200 ")
        assert len(live.server.server_state.connections) <= 8
        busy = [live.connect() for _ in range(8)]
        for one in busy:
            one.sendall(sent({**LONG, "stream": True}))
        time.sleep(0.5)
        with live.connect() as one:
            assert b'"code":"too_many_connections"' in b"".join(iter(lambda one=one: one.recv(2**16), b""))
        assert idle[0].recv(1) == b""
        for one in [*idle, *busy]:
            one.close()
        live.settles()


def test_a_process_that_may_open_few_files_answers_beside_idle_connections(tmp_path):
    """It answered nobody for half a minute, and wrote 100,000 tracebacks."""
    save_checkpoint(tmp_path / "model")
    with process(tmp_path / "model", "--name", "tiny") as (server, url, lines):
        port = int(url.rpartition(":")[2])
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (256, 256))
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
        for _ in range(5):
            answer = httpx.post(f"{url}/v1/completions", json={**SHORT, "save_state": True}, timeout=20)
            assert answer.status_code == 200
            assert "state" in answer.json()["choices"][0]
        for one in idle:
            one.close()
    assert not any("Traceback" in line for line in lines), lines[:50]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/states", "/tokenize"])
@pytest.mark.parametrize("large", [False, True])
def test_a_client_that_asks_before_it_sends_is_told_that_a_body_is_too_large(live, client, path, large):
    length = 2**40 if large else 10
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
    with live.connect() as one:
        one.sendall(head.encode())
        content = one.recv(2**16)
        assert content.startswith(b"HTTP/1.1 413 " if large else b"HTTP/1.1 100 "), content
