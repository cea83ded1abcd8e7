"""What goes wrong: the request at fault gets a clear error, every other one completes, and no slot is lost."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import httpx
import openai
import pytest
from live_server import KEY, running, sent
from sampling import every

from penstock.server import app, connection
from penstock.server.limits import Limits

LONG = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "a", "max_tokens": 5, "ignore_eos": True}


def bystander(client):
    """A request that must complete."""
    answer = client.completions.create(model="tiny", prompt="b", max_tokens=5, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("running_already", [False, True], ids=["waiting", "running"])
def test_a_disconnect_frees_the_slots(live, client, stream, running_already):
    steps, began = live.engine.stats.generated_tokens, time.monotonic()
    connections = [live.connect() for _ in range(6)]  # more than slots
    for one in connections:
        one.sendall(sent({**LONG, "stream": stream}))
    if running_already:
        while live.engine.stats.generated_tokens < steps + 50:
            time.sleep(0.01)
    for one in connections:
        one.close()
    bystander(client)
    live.settles()
    assert live.engine.stats.generated_tokens - steps < 6 * LONG["max_tokens"], time.monotonic() - began


def test_closing_a_stream_of_openais_client_frees_its_slot(live, client):
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    for _, _ in zip(range(3), stream):
        pass
    assert live.engine.stats.running == 1
    stream.close()
    live.settles()


MALFORMED = {
    "empty": (b"", "the body must be JSON"),
    "cut": (b'{"model": "tiny", "prom', "the body must be JSON"),
    "utf-8": (b'{"model": "tiny", "prompt": "\xff"}', "the body must be UTF-8, got byte 0xff at 29"),
    "list": (b"[]", "the body must be a JSON object"),
    "nested": (b"[" * 100_000, "the body must be plain JSON"),
    "digits": (b'{"n": ' + b"9" * 5000 + b"}", "the body must be plain JSON"),
    "infinite": (b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', "temperature must be"),
    "nan": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature must be"),
    "surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', "must be free of lone surrogates"),
    "twice": (b'{"model": "tiny", "prompt": "a", "model": "huge"}', "got the name 'model' twice in an object"),
    "surrogate name": (b'{"\\ud800": 1}', "got '\\ud800'"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_malformed_bodies(live, client, path, name):
    content, message = MALFORMED[name]
    if path == "responses":
        content = content.replace(b'"prompt":', b'"input" :')  # as long
    if path == "chat/completions":
        content = content.replace(b'"prompt": "a"', b'"messages": [{"role": "user", "content": "a"}]')
        content = content.replace(b'"prompt": "\\ud800"', b'"messages": [{"role": "user", "content": "\\ud800"}]')
    answer = httpx.post(f"{live.url}/v1/{path}", content=content, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    bystander(client)


def test_other_content_types_paths_and_methods(live):
    answer = httpx.post(f"{live.url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (415, "invalid_request_error")
    assert "got 'text/plain'. Send the header Content-Type: application/json." in answer.json()["error"]["message"]
    wrong = ("GET", "/v1/none", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("POST", "/v1/completions/", 404)
    for method, path, status in wrong:
        answer = httpx.request(method, live.url + path)
        assert answer.status_code == status
        assert f"got {method} '{path}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_of_100_megabytes_is_refused(live, client, chunked):
    content = b"a" * 100_000_000
    pieces = (content[:1_000_000] for _ in range(100))
    answer = httpx.post(
        f"{live.url}/v1/completions", content=pieces if chunked else content, headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 413
    assert "the body must be at most 4194304 bytes, got 100000000" in answer.json()["error"]["message"]
    bystander(client)


def test_a_slow_body_is_refused(model):
    with running(model, Limits(body_seconds=0.2)) as live, live.connect() as slow:
        slow.sendall(sent(SHORT)[:-5])
        bystander(live.client)
        assert b"408" in slow.recv(100)
        live.settles()


MANY = 200_000
ERRORS = {
    "stop tokens": {"stop_token_ids": [-1] * MANY},
    "names": {f"a{n}": 1 for n in range(MANY)},
    "biases": {"logit_bias": dict.fromkeys(map(str, range(MANY)), 1000)},
    "tokens of biases": {"logit_bias": {f"a{n}": 1 for n in range(MANY)}},
    "prompts": {"prompt": [-1] * MANY},
    "lists": {"prompt": [[-1]] * MANY},
    "metadata": {"metadata": dict.fromkeys(map(str, range(MANY)), 1)},
    "tools": {"tools": [1] * MANY, "messages": [{"role": "user", "content": "a"}]},
    "stops": {"stop": [""] * MANY},
    "messages": {"messages": [1] * MANY},
    "parts": {"messages": [{"role": "user", "content": [1] * MANY}]},
    "names of 1 MB": {"a" * 10**6: 1},
    "empty prompts": {"prompt": [[]] * MANY},
    "parts of messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}] * 1025},
    "roles": {"messages": [{"role": "x", "content": "a", "a": 1}] * (MANY // 10)},
}


@pytest.mark.parametrize("name", every(3, ERRORS))
def test_a_body_of_many_errors_is_refused_at_once_with_few_of_them(live, client, name):
    path, more = ("chat/completions", {}) if "messages" in ERRORS[name] else ("completions", {"prompt": "a"})
    content, began = json.dumps({"model": "tiny", **more, **ERRORS[name]}).encode(), time.monotonic()
    answer = httpx.post(f"{live.url}/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert time.monotonic() - began < 2.5, "each error took 80 us"


WHOLE = sent(SHORT)
PLAIN = connection.HEAD_SECONDS
PARTS = {"none": b"", "begun": WHOLE[:20], "almost": WHOLE[: WHOLE.index(b"\r\n\r\n") + 2]}


@pytest.mark.parametrize("before", [b"", WHOLE], ids=["first", "second"])
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_slow_head_is_refused(live, client, monkeypatch, part, before):
    """Its time is short for one head of one connection: others may be slow because the machine is."""
    with socket.socket() as slow:
        slow.settimeout(60)
        slow.bind(("127.0.0.1", 0))
        heads, name, await_head = [PLAIN] * (before != b"") + [0.5, PLAIN], slow.getsockname(), connection.Connection._await_head

        def awaiting(self):
            with monkeypatch.context() as patch:
                patch.setattr(connection, "HEAD_SECONDS", heads.pop(0) if self.client == name else PLAIN)
                await_head(self)

        monkeypatch.setattr(connection.Connection, "_await_head", awaiting)
        slow.connect(("127.0.0.1", live.port))
        slow.sendall(before + part)
        bystander(client)
        content = b"".join(iter(lambda: slow.recv(4096), b""))
    *_, body = content.split(b"\r\n\r\n")
    assert content.count(b"HTTP/1.1 200 OK") == (before != b"")
    assert b"HTTP/1.1 408 Request Timeout" in content
    assert json.loads(body)["error"]["code"] == "timeout"


def test_a_request_may_take_longer_than_its_head(live, client, monkeypatch):
    received = connection.Connection.data_received

    def short(self, data):
        """The time of the head ends soon after it has arrived."""
        received(self, data)
        monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
        self._await_head()

    monkeypatch.setattr(connection.Connection, "data_received", short)
    began = time.monotonic()
    answer = httpx.post(f"{live.url}/v1/completions", json={**LONG, "max_tokens": 500}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 500
    assert time.monotonic() - began > 0.1


OTHERS = {
    "TLS": b"\x16\x03\x01\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "long head": b"GET / HTTP/1.1\r\nHost: localhost\r\na: " + b"a" * 10**6,
    "length": WHOLE.replace(b"Length: ", b"Length: x"),
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_what_is_no_http_gets_openais_error(live, client, content):
    with live.connect() as one, suppress(ConnectionError):
        one.sendall(content)
        head, _, body = b"".join(iter(lambda: one.recv(4096), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert json.loads(body)["error"]["code"] == "invalid_http"
    bystander(client)


async def answers(port, count, body):
    """Status lines of many requests at once, and their headers."""

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent(body, headers="Connection: close\r\n"))
        content = await reader.read()
        writer.close()
        return content

    return await asyncio.gather(*(one() for _ in range(count)))


def test_thousands_of_requests_are_queued_or_refused_with_429(model):
    with running(model, max_queue=100) as live:
        found = asyncio.run(answers(live.port, 2000, SHORT))
        done = [one for one in found if one.startswith(b"HTTP/1.1 200 ")]
        refused = [one for one in found if one.startswith(b"HTTP/1.1 429 ")]
        assert len(done) + len(refused) == 2000
        assert len(done) >= 100
        assert refused
        assert all(b"retry-after: 1\r\n" in one.lower() for one in refused)
        assert all(b'"code":"queue_full"' in one for one in refused)
        assert all(b'"completion_tokens":5' in one for one in done)
        bystander(live.client)
        live.settles()


def hold_and_queue(live):
    """Two connections to a server of one slot: the request of the first runs, that of the second waits."""
    holding = [live.connect() for _ in range(2)]
    for n, one in enumerate(holding):
        one.sendall(sent(LONG))
        live.reaches(lambda n=n: (live.engine.stats.running, live.engine.stats.waiting) == (1, n))
    return holding


def test_a_full_queue_is_openais_rate_limit_error(model):
    with running(model, slots=1, max_queue=1) as live:
        holding = hold_and_queue(live)
        with pytest.raises(openai.RateLimitError, match="waiting completions of a client must be at most 1") as caught:
            bystander(live.client)
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="prompts times n must be at most 1, got 2"):  # they never fit
            live.client.completions.create(model="tiny", prompt=["a", "b"])
        for one in holding:
            one.close()
        live.settles()
        bystander(live.client)


class Failing:
    """A decoder that raises at a token."""

    def __init__(self, stream, after):
        self.stream, self.left = stream, after

    def push(self, token):
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("decoder")
        return self.stream.push(token)

    def finish(self):
        return self.stream.finish()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_exception_in_the_engine_fails_its_request_alone(live, client, monkeypatch, stream):
    others = [threading.Thread(target=bystander, args=(client,)) for _ in range(8)]
    plain, made = live.engine.tokenizer.stream, []

    def failing(after):
        made.append(1)
        return Failing(plain(after), 20) if len(made) == 1 else plain(after)

    monkeypatch.setattr(live.engine.tokenizer, "stream", failing)
    starter = threading.Timer(0.02, lambda: [one.start() for one in others])
    starter.start()
    with pytest.raises(openai.APIError, match=r"got ZeroDivisionError: decoder\. Only this request failed") as caught:
        list(client.completions.create(model="tiny", prompt="a", max_tokens=50, stream=stream, extra_body={"ignore_eos": True}))
    assert stream or isinstance(caught.value, openai.InternalServerError)
    starter.join()
    for one in others:
        one.join()
    live.settles()


def test_a_decoder_that_cannot_be_made_fails_its_request_alone(live, client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(live.engine.tokenizer, "stream", lambda after: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError: division by zero"):
            client.completions.create(model="tiny", prompt="a", n=2)
    bystander(client)
    assert httpx.get(f"{live.url}/health").status_code == 200


def test_health_has_a_head(live):
    answer = httpx.head(f"{live.url}/health")
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"", "application/json")


def test_an_engine_that_stopped_is_not_healthy(model):
    with running(model) as live:
        live.engine.close()
        answer = httpx.get(f"{live.url}/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "stopped"})
        with pytest.raises(openai.InternalServerError, match="the engine must be open"):
            bystander(live.client)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_exception_in_the_server_fails_its_request_alone(live, client, monkeypatch, stream):
    from penstock.server import logprobs

    def broken(*_):
        raise ZeroDivisionError("private")

    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "token_text", broken)
        with pytest.raises(openai.APIError, match="got an internal error") as caught:
            list(client.completions.create(model="tiny", prompt="a", logprobs=1, stream=stream))
        assert "private" not in str(caught.value)
        bystander(client)
    live.settles()


def test_an_exception_in_an_endpoint_is_openais_error(live, client, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("private")

    monkeypatch.setattr(app, "completions", broken)
    with pytest.raises(openai.InternalServerError, match="got an internal error"):
        client.completions.create(model="tiny", prompt="a")


def test_a_request_ends_with_its_time(model):
    with running(model, Limits(seconds=0.3)) as live:
        with pytest.raises(openai.InternalServerError, match=r"a request must end within 0\.3 seconds") as caught:
            live.client.completions.create(model="tiny", prompt="a", max_tokens=4000, extra_body={"ignore_eos": True})
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"a request must end within 0\.3 seconds"):
            list(live.client.completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}))
        live.settles()
        live.service.limits = Limits()
        bystander(live.client)


def test_the_api_key(model):
    with running(model, api_key=KEY) as live:
        bystander(live.client)
        for wrong in ("other", KEY + "x", KEY[:-1], "é"):
            answer = httpx.get(f"{live.url}/v1/models", headers={"authorization": f"Bearer {wrong}".encode()})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            bystander(live.client.with_options(api_key="other"))
        for path in ("/v1/models", "/v1/states", "/v1/models/tiny", "/v1/states/a"):
            assert httpx.get(live.url + path).status_code == 401
        for path in ("/v1/responses/a", "/v1/responses/a/input_items"):
            assert httpx.get(live.url + path).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/states"):
            assert httpx.post(live.url + path, content=b"x").status_code == 401
        for method in ("GET", "HEAD", "POST", "PUT"):
            for path in ("/v1", "/v1/", "/v1/none", "/v1/none/of/these", "/v1/models", "/v1/completions", "/tokenize", "/detokenize/x"):
                assert httpx.request(method, live.url + path).status_code == 401
                known = httpx.request(method, live.url + path, headers={"authorization": f"Bearer {KEY}"})
                assert known.status_code in (200, 404, 405, 415), (method, path)
            for path in ("/none", "/v10", "/tokenizer"):
                assert httpx.request(method, live.url + path).status_code == 404
        for path in ("/", "/page.js", "/page.css", "/health", "/metrics"):
            assert httpx.get(live.url + path).status_code == 200


def test_chats_need_a_template(model):
    with running(model, template=None) as live, pytest.raises(openai.BadRequestError, match="must have a chat template"):
        live.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


def test_metrics_count_answers_and_tokens(live, client):
    bystander(client)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", n=99)
    httpx.get(f"{live.url}/made/up")
    text = httpx.get(f"{live.url}/metrics").text
    assert 'penstock_http_answers_total{path="/v1/completions",status="200"}' in text
    assert 'penstock_http_answers_total{path="/v1/completions",status="400"}' in text
    assert 'penstock_http_answers_total{path="other",status="404"}' in text
    assert "made" not in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["penstock_generated_tokens_total"]) == live.engine.stats.generated_tokens
    assert float(values["penstock_inter_token_seconds_count"]) > 0
    assert float(values["penstock_time_to_first_token_seconds_count"]) > 0


@pytest.mark.parametrize(("drain_seconds", "count"), [(250, 300), (0.2, 4000)], ids=["finishes", "times out"])
def test_the_end_finishes_what_runs_within_a_time(model, drain_seconds, count):
    with running(model, drain_seconds=drain_seconds) as live:
        results, queued, put = [], [], live.engine._put
        live.engine._put = lambda request: queued.append(request) or put(request)

        def request():
            try:
                stream = live.client.completions.create(
                    model="tiny", prompt="a", max_tokens=count, stream=True, stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True}, timeout=250,
                )  # fmt: skip
                results.append(list(stream)[-1].usage.completion_tokens)
            except openai.APIError as error:
                results.append(str(error))

        threads = [threading.Thread(target=request) for _ in range(8)]
        for one in threads:
            one.start()
        live.reaches(lambda: live.engine.stats.generated_tokens >= 20 and len(queued) == 8)
        live.server.should_exit = True
        for one in threads:
            one.join()
    if drain_seconds == 250:
        assert results == [count] * 8
    else:
        assert results == ["server: it must be running, got a shutdown."] * 8
    assert live.engine.stats.running == live.engine.stats.waiting == 0
    live.engine.check_integrity()


def test_a_batch_that_does_not_fit_the_queue_is_refused_before_any_of_it_is_queued(model):
    """Clients that try again at once cost the engine nothing, and wait."""
    with running(model, slots=1, max_queue=4) as live:
        engine, queued = live.engine, []
        put = engine._put
        engine._put = lambda request: queued.append(request) or put(request)
        holding = hold_and_queue(live)
        before, begin = len(queued), time.perf_counter()
        with pytest.raises(openai.RateLimitError, match="got 1 and 4 more"):
            live.client.completions.create(model="tiny", prompt=["a", "b", "c", "d"], max_tokens=5)
        assert len(queued) == before
        assert time.perf_counter() - begin >= 0.25
        for one in holding:
            one.close()
        live.settles()
