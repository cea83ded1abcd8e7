"""The event loop answers others at once, whatever one request asks for."""

import gc
import json
import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
from live_server import VOCAB, running
from sampling import every

from penstock.server.limits import Limits

MOST = 0.1
"""Seconds that the loop may do nothing else, and that a thread may wait for Python's lock."""


class Probe:
    """Measures the largest time between two turns: of the clock, and of this process on a CPU."""

    def __init__(self):
        self.largest, self._last, self.running = [0.0, 0.0], None, True

    def turn(self):
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.largest = [max(most, one - last) for most, one, last in zip(self.largest, now, self._last)]
        self._last = now

    def of_loop(self, loop):
        """Turns of an event loop."""
        self.turn()
        if self.running:
            loop.call_later(0.002, self.of_loop, loop)

    def of_lock(self):
        """Turns of a thread, for which it needs Python's lock only."""
        while self.running:
            self.turn()
            time.sleep(0.002)


@contextmanager
def responsive(live, clock=None):
    """The loop does so all the time, nothing keeps Python's lock, and /health is answered.

    clock : float, optional
        Seconds of the clock that it may be away. Default: other processes of the machine may keep it waiting.
    """
    gc.collect()
    gc.freeze()  # as penstock serve does
    probe, lock, loop = Probe(), Probe(), live.server.servers[0].get_loop()
    loop.call_soon_threadsafe(probe.of_loop, loop)
    thread = threading.Thread(target=lock.of_lock)
    thread.start()
    try:
        yield
    finally:
        probe.running = lock.running = False
        thread.join()
        gc.unfreeze()
    assert httpx.get(f"{live.url}/health").status_code == 200
    if clock is None:
        assert min(lock.largest) < MOST
    assert min(probe.largest) < MOST if clock is None else probe.largest[0] < clock


class Nested(str):
    """JSON of so many levels, which Python's encoder does not write."""


def nested(begin, end):
    return Nested(begin * 950 + "{}" + end * 950)


def encoded(body):
    """JSON of a body in which a text may stand for JSON of many levels."""
    inserted = []

    def default(value):
        if isinstance(value, list) and len(value) < 10:
            return [default(one) for one in value]
        return {name: default(one) for name, one in value.items()} if isinstance(value, dict) else marked(value)

    def marked(value):
        if not isinstance(value, Nested):
            return value
        inserted.append(value)
        return f"<{len(inserted) - 1}>"

    text = json.dumps(default(body))
    for n, value in enumerate(inserted):
        text = text.replace(f'"<{n}>"', value)
    return text.encode()


def text_format(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def patterns(count):
    return {"type": "object", "patternProperties": {f"^a{n}[a-z]{{1,9}}x{n}$": {"type": "string"} for n in range(count)}}


ALTERNATIVES = {"anyOf": [{"type": "string", "pattern": f"^(a|b)*{n}(c|d){{1,{n % 9 + 2}}}.*e$"} for n in range(490)]}
FULL = "a" * 4_000_000
DEEP = nested('{"properties":{"a":', "}}")


def called(given, result="a"):
    """A conversation with a call and its result."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": given}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}]}
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}, answered]}


WIDE = {"properties": {f"{n}": {} for n in range(200_000)}}
BOTH = {
    "deep schema": (text_format(nested('{"properties":{"a":', "}}")), 400),
    "deep list in a schema": (text_format(nested('{"anyOf":[', "]}")), 400),
    "deep field": ({"stop": nested("[", "]")}, 400),
    "deep number": ({"max_tokens": nested('{"a":', "}")}, 400),
    "deep unknown": ({"metadata": nested('{"a":', "}")}, 400),
    "patterns": (text_format(patterns(490)), 400),
    "fewer patterns": (text_format(patterns(64)), 200),
    "alternatives": (text_format(ALTERNATIVES), 200),
    "large schema": (text_format({"enum": ["a" * 60_000]}), 200),
    "too large a schema": (text_format({"enum": ["a" * 3_000_000]}), 400),
    "biases": ({"logit_bias": {str(n): 1 for n in range(VOCAB)}, "n": 16}, 200),
    "stops": ({"stop": [chr(97 + n) * 256 for n in range(16)], "n": 16}, 200),
    "wide schema": (text_format(WIDE), 400),
    "unread fields": ({"metadata": {f"{n}": "a" for n in range(200_000)}}, 200),
    "unknown": ({"a" * 1000: FULL}, 400),
}
REQUESTS = {f"{name} of {path}": (path, more, status) for name, (more, status) in BOTH.items() for path in ("completions", "chat")} | {
    "tokens": ("completions", {"prompt": [97] * 131_072}, 200),
    "too many tokens": ("completions", {"prompt": [97] * 1_000_000}, 400),
    "lists of tokens": ("completions", {"prompt": [[97] * 8192] * 64, "n": 2, "max_tokens": 1}, 200),
    "too long lists of tokens": ("completions", {"prompt": [[97] * 15_000] * 64}, 400),
    "texts": ("completions", {"prompt": ["a" * 4000] * 64, "n": 4}, 200),
    "long text": ("completions", {"prompt": FULL}, 400),
    "long texts": ("completions", {"prompt": ["a" * 60_000] * 64}, 400),
    "long text of tokenize": ("/tokenize", {"prompt": "a" * 1_000_000, "return_token_strs": True}, 200),
    "many tokens of detokenize": ("/detokenize", {"tokens": [97] * 500_000}, 200),
    "deep message of tokenize": ("/tokenize", {"messages": nested("[", "]")}, 400),
    "deep field of messages": ("messages", {"system": nested("[", "]")}, 400),
    "wide variables": ("chat", {"chat_template_kwargs": WIDE}, 400),
    "wide schema of tools": ("chat", {"tools": [{"type": "function", "function": {"name": "a", "parameters": WIDE}}]}, 400),
    "wide schema of messages": ("messages", {"tools": [{"name": "a", "input_schema": WIDE}]}, 400),
    "deep schema of tools": ("chat", {"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]}, 400),
    "deep schema of messages": ("messages", {"tools": [{"name": "a", "input_schema": DEEP}]}, 400),
    "deep input of messages": ("messages", called(nested('{"a":', "}")), None),
    "long input of messages": ("messages", called({"a": FULL}), 400),
    "wide input of messages": ("messages", called({f"{n}": n for n in range(200_000)}), 400),
    "parts of messages": ("messages", called({}, [{"type": "text", "text": "a" * 3000}] * 1000), 400),
    "too many parts of messages": ("messages", called({}, [{"type": "text", "text": ""}] * 100_000), 400),
    "long message of messages": ("messages", {"messages": [{"role": "user", "content": FULL}]}, 400),
    "long message": ("chat", {"messages": [{"role": "user", "content": FULL}]}, 400),
    "messages": ("chat", {"messages": [{"role": "user", "content": "a" * 100}] * 1000}, 200),
    "parts": ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 3000}] * 1000}]}, 400),
    "echo": ("completions", {"prompt": "a" * 20_000, "echo": True, "logprobs": 20, "max_tokens": 0}, 200),
    "echo to 16": ("completions", {"prompt": "a" * 20_000, "echo": True, "logprobs": 20, "max_tokens": 0, "n": 16}, 400),
    "plain echo to 16": ("completions", {"prompt": ["a" * 50_000] * 64, "echo": True, "max_tokens": 0, "n": 16}, 400),
    "echo of many": ("completions", {"prompt": ["a" * 1000] * 64, "echo": True, "logprobs": 20, "n": 16}, 400),
    "stream of an echo": ("completions", {"prompt": "a" * 20_000, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": True}, 200),
    "stream to 16": ("completions", {"logprobs": 20, "n": 16, "max_tokens": 100, "stream": True}, 200),
    "log probabilities": ("completions", {"logprobs": 20, "n": 16, "max_tokens": 200}, 200),
    "log probabilities of a prompt": ("completions", {"prompt": "a" * 9000, "prompt_logprobs": 20, "max_tokens": 1}, 200),
    "too many of a prompt": ("completions", {"prompt": "a" * 9000, "prompt_logprobs": 20, "n": 16}, 400),
    "many of a prompt of a chat": ("chat", {"messages": [{"role": "user", "content": "a" * 20_000}], "prompt_logprobs": 20}, 400),
    "log probabilities of a chat": ("chat", {"logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 100}, 200),
    "too many of a chat": ("chat", {"logprobs": True, "top_logprobs": 20, "n": 16}, 400),
}


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "messages": "/v1/messages"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
FIELDS = {
    "completions": {"prompt": "a", "max_tokens": 2, "ignore_eos": True}, "chat": {**MESSAGES, "max_tokens": 2, "ignore_eos": True},
    "messages": {**MESSAGES, "max_tokens": 2},
}  # fmt: skip


# a status of None: Python may or may not write so many levels, by the depth of its stack
@pytest.mark.parametrize("name", every(6, REQUESTS))
def test_no_request_keeps_the_loop_from_others(live, client, name):
    path, more, status = REQUESTS[name]
    body = {**FIELDS.get(path, {}), "model": "tiny", **more}
    if name.startswith("too many of a chat"):
        del body["max_tokens"]
    content, url = encoded(body), live.url + PATHS.get(path, path)
    with responsive(live):
        answer = httpx.post(url, content=content, headers={"content-type": "application/json"}, timeout=200)
    assert answer.status_code in ((200, 400) if status is None else (status,)), answer.text[:300]
    if answer.status_code == 400:
        assert len(answer.content) < 1000
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"]
    live.settles()


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"logprobs": 20}, {"prompt_logprobs": 5}], ids=str)
def test_an_estimate_of_an_answer_is_not_far_from_its_size(live, client, monkeypatch, path, more):
    """The bound refuses what is larger, and not what is much smaller."""
    estimates = []
    monkeypatch.setattr(live.service, "check_answer", lambda _, size: estimates.append(size))
    body = {"model": "tiny", "max_tokens": 150, "ignore_eos": True, "n": 2, **more}
    if path == "completions":
        body |= {"prompt": "abc" * 100}
    else:
        body |= {"messages": [{"role": "user", "content": "abc" * 100}]}
        if "logprobs" in more:
            body |= {"logprobs": True, "top_logprobs": more["logprobs"]}
    size = len(httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60).content)
    assert 0.3 < size / estimates[0] < 1.7


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_first_masks_are_made_off_the_loop_few_at_a_time(model, monkeypatch, path, n):
    with running(model) as live:
        now, most, lock = [0], [0], threading.Lock()

        class Slow:
            mask = b"\xff" * 33

            def __init__(self):
                with lock:
                    now[0] += 1
                    most[0] = max(most[0], now[0])
                time.sleep(1.2)
                with lock:
                    now[0] -= 1

            def accept(self, _):
                return False

        monkeypatch.setattr(live.service.grammars, "compile", lambda *_: Slow)
        given = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
        body = {"model": "tiny", **given, "max_tokens": 3, "n": n, "response_format": {"type": "json_object"}}
        statuses = []

        def ask():
            statuses.append(httpx.post(f"{live.url}/v1/{path}", json=body, timeout=60).status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        with responsive(live, clock=0.9):
            for one in threads:
                one.start()
            while not most[0]:
                time.sleep(0.01)
            assert live.client.completions.create(model="tiny", prompt="a", max_tokens=2).choices
            assert now[0], "other requests wait for no grammar"
            for one in threads:
                one.join()
        assert statuses == [200] * 4
        assert most[0] <= 2
        live.settles()


def test_a_client_that_leaves_while_its_masks_are_made_leaves_nothing(model, monkeypatch):
    with running(model) as live:
        made = threading.Event()

        class Slow:
            mask = b"\xff" * 33

            def __init__(self):
                made.set()
                time.sleep(0.5)

            def accept(self, _):
                return False

        monkeypatch.setattr(live.service.grammars, "compile", lambda *_: Slow)
        with pytest.raises(openai.APITimeoutError):
            live.client.with_options(timeout=0.2).completions.create(
                model="tiny", prompt="a", max_tokens=4000, n=2, extra_body={"response_format": {"type": "json_object"}, "ignore_eos": True}
            )
        assert made.wait(10)
        live.settles()
        assert live.engine.stats.generated_tokens < 4000


def test_a_schema_that_takes_too_long_is_refused(model, monkeypatch):
    with running(model, Limits(schema_seconds=0.3)) as live:
        goes_on = threading.Event()
        monkeypatch.setattr(live.service.grammars, "compile", lambda *_: goes_on.wait(60))
        for _ in range(4):  # two of them run, and two wait
            with pytest.raises(openai.BadRequestError, match=r"a schema must be compiled within 0\.3 seconds") as caught:
                live.client.completions.create(model="tiny", prompt="a", extra_body={"response_format": {"type": "json_object"}})
            assert caught.value.code == "schema_timeout"
        assert live.client.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        goes_on.set()
