"""Lines of the log, ids of requests, and spans: what every endpoint gives, whatever happens to a request."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import httpx
import pytest
from live_server import process, running, save_checkpoint, sent
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sampling import slow

from penstock.errors import MissingExtra
from penstock.server import app as routes
from penstock.server import limits
from penstock.server.keys import Keys
from penstock.server.tracing import Tracing

SECRET = "alice-secret"
POSTS = {
    "/v1/completions": {"model": "tiny", "prompt": "a" * 100},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a" * 100}]},
}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def logged(model, exporter, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice {SECRET}")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running(model, keys=Keys.read(file), tracing=Tracing(provider)) as live:
        yield live


@pytest.fixture
def lines(caplog, exporter):
    caplog.set_level(logging.DEBUG, "penstock.server")
    exporter.clear()
    return Lines(caplog)


class Lines:
    def __init__(self, caplog):
        self._caplog = caplog

    def of(self, name):
        """Those of a request, when it has ended."""
        for _ in range(1000):
            records = [one for one in self._caplog.records if one.name == "penstock.server.requests"]
            if found := [one for one in records if one.fields["request_id"] == name]:
                return found
            time.sleep(0.01)
        raise AssertionError(name)

    def one(self, name):
        (found,) = self.of(name)
        return {**found.fields, "level": found.levelname}


def asked(live, method, path, name, key=SECRET, **given):
    headers = {"authorization": f"Bearer {key}", **({} if name is None else {"x-request-id": name}), **given.pop("headers", {})}
    return httpx.request(method, live.url + path, headers=headers, timeout=60, **given)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", POSTS)
def test_a_request_is_one_line_with_its_counts(logged, lines, path, stream):
    name = f"counts-{path.replace('/', '.')}-{stream}"
    body = {**POSTS[path], "max_tokens": 3, "n": 2, "ignore_eos": True, "cache_salt": name, "stream": stream}
    assert asked(logged, "POST", path, name, json=body).headers["x-request-id"] == name
    found = lines.one(name)
    assert 0 < found.pop("first_token_seconds") <= found.pop("seconds")
    prompt = 100 if path == "/v1/completions" else found["prompt_tokens"]
    assert found == {
        "request_id": name, "key": "alice", "method": "POST", "endpoint": path, "status": 200, "error": None, "model": "tiny",
        "prompt_tokens": prompt, "cached_tokens": 0, "completion_tokens": 6, "finish_reasons": ["length", "length"], "level": "INFO",
    }  # fmt: skip
    asked(logged, "POST", path, f"{name}-again", json=body)
    assert lines.one(f"{name}-again")["cached_tokens"] >= 64


MORE = {
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/responses": {"model": "tiny", "input": "a", "max_output_tokens": 3, "store": False},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", MORE)
def test_other_apis_are_logged_and_traced_alike(logged, lines, exporter, path, stream):
    name = f"more-{path.replace('/', '.')}-{stream}"
    answer = asked(logged, "POST", path, name, json={**MORE[path], "stream": stream})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, name), answer.text
    found = lines.one(name)
    assert (found["endpoint"], found["status"], found["key"], found["error"]) == (path, 200, "alice", None)
    assert 0 < found["completion_tokens"] <= 3
    assert [*spans_of(exporter, name)[1]] == ["queue", "prompt", "decode"]


OTHERS = {
    "no path": ("GET", "/v1/none", SECRET, {}, 404, "not_found", "other"),
    "no key": ("POST", "/v1/completions", "x", {}, 401, "invalid_api_key", "/v1/completions"),
    "no method": ("DELETE", "/v1/completions", SECRET, {}, 405, "not_found", None),
    "no JSON": ("POST", "/v1/chat/completions", SECRET, {"content": b"{"}, 415, "invalid_request_error", "/v1/chat/completions"),
    "no state": ("GET", "/v1/states/x", SECRET, {}, 404, "state_not_found", "/v1/states/{name}"),
    "models": ("GET", "/v1/models", SECRET, {}, 200, None, "/v1/models"),
    "states": ("GET", "/v1/states", SECRET, {}, 200, None, "/v1/states"),
    "health": ("GET", "/health", "", {}, 200, None, "/health"),
    "page": ("GET", "/", "", {}, 200, None, "/"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_every_answer_has_the_id_and_a_line(logged, lines, case):
    method, path, key, given, status, error, endpoint = OTHERS[case]
    name = f"other-{case.replace(' ', '.')}"
    answer = asked(logged, method, path, name, key or "x", **given)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, name)
    found = lines.one(name)
    assert (found["status"], found["error"], found["method"]) == (status, error, method)
    assert endpoint is None or found["endpoint"] == endpoint
    assert found["level"] == ("DEBUG" if case in ("health", "page") else "INFO")
    assert SECRET not in str(found)
    made = [asked(logged, method, path, None, key or "x", **given).headers["x-request-id"] for _ in range(2)]
    assert len({*made}) == 2
    assert lines.one(made[0])["status"] == status


@pytest.mark.parametrize("wrong", ["", "a b", "a" * 129, "é", "a\x7f", "a=1", '"'])
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/none"])
def test_ids_of_other_characters_are_refused(logged, lines, path, wrong):
    answer = asked(logged, "GET", path, wrong.encode("latin-1"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request_id")
    assert lines.one(answer.headers["x-request-id"])["error"] == "invalid_request_id"


def test_what_is_no_http_has_an_id_and_a_line(logged, lines):
    with logged.connect() as one, suppress(ConnectionError):
        one.sendall(b"\x16\x03\x01\r\n\r\n")
        head = b"".join(iter(lambda: one.recv(4096), b"")).partition(b"\r\n\r\n")[0].decode()
    name = next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("x-request-id"))
    found = lines.one(name)
    assert (found["status"], found["error"]) == (400, "invalid_http")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", POSTS)
def test_clients_that_disconnect_are_499(logged, lines, path, stream):
    name = f"gone-{path.replace('/', '.')}-{stream}"
    body = {**POSTS[path], "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    content, steps = json.dumps(body), logged.engine.stats.generated_tokens
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    with logged.connect() as one:
        one.sendall(f"{head}Authorization: Bearer {SECRET}\r\nX-Request-Id: {name}\r\n\r\n{content}".encode())
        while logged.engine.stats.generated_tokens == steps:
            time.sleep(0.01)
    assert lines.one(name)["status"] == 499
    logged.settles()


def test_work_before_the_engine_ends_with_its_client(logged, lines, monkeypatch):
    begun = []

    async def stuck(*_):
        begun.append(True)
        await asyncio.sleep(60)

    monkeypatch.setattr(limits, "LARGE", 0)
    monkeypatch.setattr(logged.service.processes, "run", stuck)
    paths = [one.path for one in logged.server.config.app.routes if getattr(one, "openapi_extra", None)]
    assert len(paths) >= 7
    for count, path in enumerate(paths, 1):
        name = f"left-{path.replace('/', '.')}"
        with logged.connect() as one:
            one.sendall(sent({}, path, f"Authorization: Bearer {SECRET}\r\nX-Request-Id: {name}\r\n"))
            while len(begun) < count:
                time.sleep(0.01)
        assert lines.one(name)["status"] == 499


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_failures_of_engine_and_server_are_logged_with_the_id(logged, lines, monkeypatch, stream, caplog):
    from penstock.server import requestlog

    with monkeypatch.context() as patch:
        patch.setattr(logged.engine.tokenizer, "stream", lambda after: 1 / 0)
        asked(logged, "POST", "/v1/completions", f"engine-{stream}", json={**POSTS["/v1/completions"], "stream": stream})
    found = lines.one(f"engine-{stream}")
    assert (found["error"], found["finish_reasons"]) == ("engine_error", ["error"])
    assert (found["status"], found["level"]) == ((200, "INFO") if stream else (500, "ERROR"))
    monkeypatch.setattr(routes, "completions", lambda *_: 1 / 0)
    handler = Kept()
    logging.getLogger("penstock.server").addHandler(handler)
    try:
        asked(logged, "POST", "/v1/completions", f"server-{stream}", json=POSTS["/v1/completions"])
        assert lines.one(f"server-{stream}")["status"] == 500
    finally:
        logging.getLogger("penstock.server").removeHandler(handler)
    texts = [one for one in handler.texts if "ZeroDivisionError" in one]
    assert texts
    for one in texts:
        assert json.loads(one)["request_id"] == f"server-{stream}"
    assert requestlog.current().id == ""


class Kept(logging.Handler):
    """Lines as they are written."""

    def __init__(self):
        from penstock.server.requestlog import JsonFormatter, _Identified

        super().__init__()
        self.texts = []
        self.setFormatter(JsonFormatter())
        self.addFilter(_Identified())

    def emit(self, record):
        self.texts.append(self.format(record))


def spans_of(exporter, name):
    for _ in range(1000):
        spans = exporter.get_finished_spans()
        roots = [one for one in spans if one.attributes.get("penstock.request_id") == name]
        if roots:
            return roots[0], {one.name: one for one in spans if one.parent and one.parent.span_id == roots[0].context.span_id}
        time.sleep(0.01)
    raise AssertionError(name)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", POSTS)
def test_spans(logged, lines, exporter, path, stream):
    name = f"span-{path.replace('/', '.')}-{stream}"
    body = {**POSTS[path], "max_tokens": 5, "ignore_eos": True, "stream": stream}
    asked(logged, "POST", path, name, json=body, headers={"traceparent": PARENT})
    root, parts = spans_of(exporter, name)
    assert root.name == f"POST {path}"
    assert f"{root.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{root.parent.span_id:016x}" == PARENT.split("-")[2]
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["penstock.key"] == "alice"
    assert [*parts] == ["queue", "prompt", "decode"]
    times = [time for one in parts.values() for time in (one.start_time, one.end_time)]
    assert times == sorted(times)
    assert root.start_time <= times[0] <= times[-1] <= root.end_time
    assert abs(root.start_time - time.time_ns()) < 60e9


def test_spans_of_errors(logged, lines, exporter):
    asked(logged, "GET", "/v1/none", "span-404", headers={"traceparent": "no trace"})
    root, parts = spans_of(exporter, "span-404")
    assert (root.parent, parts, root.attributes["error.type"]) == (None, {}, "not_found")


def test_traces_need_an_endpoint_and_the_extra(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert Tracing.configured(None) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    for endpoint in (None, "http://127.0.0.1:9"):
        with pytest.raises(MissingExtra, match=r"opentelemetry-sdk and .* must be installed, got none. Run pip install -e '\.\[otel\]'"):
            Tracing.configured(endpoint)


def test_a_server_imports_no_exporter_without_an_endpoint():
    """FastAPI itself imports OpenTelemetry's API where that is installed."""
    code = "import sys, penstock.server.app, penstock.cli.serve; sys.exit('opentelemetry.exporter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@contextmanager
def collector():
    """What is sent to an endpoint."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("form", ["json", *slow("text")])
def test_a_served_checkpoint_writes_lines_and_sends_spans(tmp_path, form):
    save_checkpoint(tmp_path / "small")
    with collector() as (endpoint, got):
        words = ["--log-format", form, "--otlp-endpoint", endpoint]
        with process(tmp_path / "small", *words) as (server, url, lines):
            headers = {"x-request-id": "served-1"}
            httpx.post(f"{url}/v1/completions", json={"model": "small", "prompt": "a", "max_tokens": 2}, headers=headers)
            httpx.get(f"{url}/health", headers={"x-request-id": "quiet"})
            server.terminate()
            server.wait(60)
        assert got
        assert {path for path, _ in got} == {"/v1/traces"}
        assert any(b"served-1" in content for _, content in got)
    found = [line for line in lines if "served-1" in line]
    assert len(found) == 1
    assert not [line for line in lines if "quiet" in line]
    if form == "json":
        first = next(n for n, line in enumerate(lines) if line.startswith("{"))  # after what the command says of the machine
        read = [json.loads(line) for line in lines[first:]]
        assert {"time", "level", "message"} <= {*read[0]}
        assert json.loads(found[0])["status"] == 200
    else:
        assert "INFO request request_id=served-1 method=POST endpoint=/v1/completions status=200" in found[0]
