"""A small request beside clients that want everything, over HTTP: counted in steps of the engine, which no load of the machine changes.

The prompt budget is fixed, because the engine adapts it to measured times otherwise, and a small request waits for a turn of each other.
"""

import threading
import time
from contextlib import suppress

import httpx
import pytest
from live_server import running

from penstock.server.keys import Keys

SMALL = {"model": "tiny", "prompt": "b" * 20, "max_tokens": 16, "ignore_eos": True, "temperature": 0}
PROMPTS = [f"{n} prompt" for n in range(64)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 400}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
HOGS = {
    "completions": [{"prompt": PROMPTS, "n": 16, "max_tokens": 100}],
    "three": [{"prompt": PROMPTS, "n": 16, "max_tokens": 100}] * 3,
    "prompts of 8k": [{"prompt": [n * i % 200 for i in range(8192)], "max_tokens": 100} for n in range(1, 9)],
    "streams": [{"prompt": f"{n}", "max_tokens": 4000, "stream": True} for n in range(24)],
    "grammars": [{"prompt": f"{n}", "n": 8, "max_tokens": 1000, "response_format": FORMAT} for n in range(4)],
    "connections": [{"prompt": f"{n}", "max_tokens": 500} for n in range(100)],
}


class Marks:
    """The steps between the arrival of a request in the engine and its end."""

    def __init__(self, steps):
        self.found = []
        self._steps, self._add, self._close, self._began = steps, steps.add, steps._close_if_done, {}
        steps.add, steps._close_if_done = self.add, self.close

    def add(self, request):
        if request.prompt == [*SMALL["prompt"].encode()]:
            self._began[request] = self._steps.steps
        self._add(request)

    def close(self, request):
        self._close(request)
        if request.done and request in self._began:
            self.found.append(self._steps.steps - self._began.pop(request))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("hog hog-secret\nsmall small-secret\n")
    return Keys.read(file)


@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "one address"])
@pytest.mark.parametrize("hog", HOGS)
def test_a_small_request_takes_at_most_three_times_its_steps_alone(model, keys, hog, keyed):
    with running(model, keys=keys if keyed else None, slots=8, token_budget=1024, prompt_budget=256, max_queue=4096) as live:

        def asked(name, body):
            return httpx.post(
                f"{live.url}/v1/completions", json={"model": "tiny", **body}, headers={"authorization": f"Bearer {name}"}, timeout=120
            )

        marks = Marks(live.engine._steps)

        def small():
            answer = asked("small-secret", SMALL)
            assert answer.status_code == 200, answer.text
            return marks.found[-1], answer.json()["choices"]

        alone, wanted = small()

        def hogs(body):
            with suppress(httpx.HTTPError):
                asked("hog-secret", {"ignore_eos": "response_format" not in body, **body})

        threads = [threading.Thread(target=hogs, args=(body,)) for body in HOGS[hog]]
        for one in threads:
            one.start()
        while live.engine.stats.running < 8:
            assert any(one.is_alive() for one in threads)
        found = [small() for _ in range(3)]
        stats = live.engine.stats
        assert stats.running + stats.waiting >= 7, "the hogs still run"
        live.server.servers[0].get_loop().call_soon_threadsafe(live.service.abort)
        for one in threads:
            one.join()
        assert max(steps for steps, _ in found) <= 3 * alone, (alone, found)
        assert all(choices == wanted for _, choices in found)
        live.settles()


SMALL_OF = {
    "/v1/completions": SMALL,
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "b"}], "max_tokens": 4},
}


@pytest.mark.parametrize("path", SMALL_OF)
def test_a_client_does_not_get_all_threads(model, keys, path, monkeypatch):
    """Its schemas take seconds to compile; requests of others are tokenized meanwhile."""
    with running(model, keys=keys) as live:
        free, working = threading.Event(), []

        def slow(*_):
            working.append(1)
            free.wait(60)
            raise ValueError

        monkeypatch.setattr(live.service.grammars, "compile", slow)

        def hogs():
            body = {"model": "tiny", "prompt": "a", "response_format": {"type": "json_object"}}
            httpx.post(f"{live.url}/v1/completions", json=body, headers={"authorization": "Bearer hog-secret"}, timeout=120)

        threads = [threading.Thread(target=hogs) for _ in range(50)]
        for one in threads:
            one.start()
        while not working:
            time.sleep(0.01)
        try:
            answer = httpx.post(live.url + path, json=SMALL_OF[path], headers={"authorization": "Bearer small-secret"}, timeout=30)
            assert answer.status_code == 200, answer.text
            assert len(working) <= 2
        finally:
            free.set()
        for one in threads:
            one.join()
