"""The door of several replicas: which one a request goes to, limits of all together, and replicas that end. Without Ray."""

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import openai
import pytest
from live_server import VOCAB, small_model

from penstock.engine import Engine
from penstock.models.tokenizers import Bytes
from penstock.server.affinity import conversation, ranked
from penstock.server.door import Door, Known, create_door
from penstock.server.keys import Keys
from penstock.server.limits import Limits
from penstock.server.link import Kind, Link
from penstock.server.replica import Replica
from penstock.server.run import serving
from penstock.server.service import Service
from penstock.server.templates import WorldTemplate

SECRET = b"a secret of this test"
LONG = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 4}
LIMITS = Limits(max_tokens=100_000)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
KEYS = """
free 00000000-free
asks 00000000-asks requests_per_minute=6
reads 00000000-reads tokens_per_minute=60
"""


class Live:
    """Replicas in threads of this process, and their door."""

    def __init__(self, count, folder, keys, max_queue):
        self.names = [f"replica{n}" for n in range(count)]
        self.services, self.replicas, self.keys = {}, {}, keys
        self._model, self._folder = small_model(), folder
        for name in self.names:
            self.start(name)
        self.door = Door(self.look, self.scrape, SECRET, LIMITS, max_queue, keys)
        self.server = serving(create_door(self.door, "tiny"), self.door, "127.0.0.1", 0, keys=keys, drain_seconds=1, log_level="warning")
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def start(self, name):
        def make():
            engine = Engine(self._model, Bytes(VOCAB), slots=2, token_budget=256)
            self.services[name] = Service(engine, "tiny", WorldTemplate(), LIMITS, self._folder)
            return self.services[name]

        self.replicas[name] = Replica(make, name, "127.0.0.1", SECRET, 1)

    async def look(self):
        return [one.about() for one in self.replicas.values()]

    async def scrape(self):
        return [one.metrics() for one in self.replicas.values()]

    def kill(self, name):
        """Cut all links, as when a process is killed."""
        replica = self.replicas.pop(name)
        replica._loop.call_soon_threadsafe(lambda: [task.cancel() for task in replica._open])
        replica._drain_seconds = 0
        replica.close()

    def running(self):
        return [one.engine.stats.running for one in self.services.values()]

    def by_loop(self, function):
        """Let the door's event loop call it."""
        self.server.servers[0].get_loop().call_soon_threadsafe(function)

    def wait(self, reached):
        for _ in range(1000):
            if reached():
                return
            time.sleep(0.01)
        raise AssertionError("not reached")

    def settles(self):
        self.wait(lambda: not self.door.running and not any(self.running()))
        assert not self.door._completions
        assert [one.open for one in self.door._replicas.values()] == [0] * len(self.replicas)

    def post(self, body, path="/v1/completions", key="free", headers=None):
        headers = {"Authorization": f"Bearer 00000000-{key}", **(headers or {})}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=30)

    @contextmanager
    def stream(self, body, path="/v1/completions"):
        headers = {"Authorization": "Bearer 00000000-free"}
        with httpx.stream("POST", f"{self.url}{path}", json={**body, "stream": True}, headers=headers, timeout=30) as answer:
            yield answer, answer.iter_lines()


@pytest.fixture
def live(tmp_path):
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "states").mkdir()
    one = Live(2, tmp_path / "states", Keys.read(tmp_path / "keys"), 3)
    yield one
    one.server.should_exit = True
    one.thread.join(30)
    for replica in one.replicas.values():
        replica.close()


def test_answers_are_those_of_one_process(live, expected):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="00000000-free", max_retries=0) as client:
        body = {**SHORT, "extra_body": {"ignore_eos": True}, "temperature": 0}
        body.pop("ignore_eos")
        wanted = expected("a", max_tokens=4, temperature=0, ignore_end=True).text
        assert client.completions.create(**body).choices[0].text == wanted
        assert "".join(piece.choices[0].text for piece in client.completions.create(**body, stream=True)) == wanted
        assert [one.id for one in client.models.list()] == ["tiny"]
    assert "Penstock" in httpx.get(live.url).text
    live.settles()


def test_keys_hosts_and_errors_are_the_doors(live):
    assert httpx.get(f"{live.url}/v1/models").status_code == 401
    assert httpx.get(f"{live.url}/v1/nothing").status_code == 401
    refused = live.post({**SHORT, "max_tokens": 200_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert live.post(SHORT, "/v1/nothing").status_code == 404
    assert httpx.post(f"{live.url}/health").status_code == 405
    assert live.post(SHORT, headers={"X-Request-Id": "own"}).headers.get_list("x-request-id") == ["own"]
    assert live.post({**SHORT, "priority": -1}).json()["error"]["code"] == "priority_not_allowed"


def test_a_conversation_stays_where_its_prefix_is(live):
    for user in range(4):
        messages = [{"role": "user", "content": f"{user} " * 100}]
        cached = []
        for _ in range(3):
            answer = live.post({**CHAT, "messages": messages}, "/v1/chat/completions").json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages = [*messages, answer["choices"][0]["message"] | {"content": "Yes?"}, {"role": "user", "content": "And?"}]
        assert cached[0] < 192 <= min(cached[1:])


def test_states_and_responses_continue_on_any_replica(live):
    saved = live.post({**SHORT, "save_state": True, "seed": 1}).json()["choices"][0]["state"]
    first = live.post({"model": "tiny", "input": "Hello", "max_output_tokens": 4}, "/v1/responses").json()
    found = []
    for name in live.names:  # only one of them runs
        others = {other: live.replicas.pop(other) for other in live.names if other != name}
        live.wait(lambda name=name: list(live.door._replicas) == [name])
        found.append(live.post({**SHORT, "state": saved, "seed": 3}).json()["choices"][0]["text"])
        following = {"model": "tiny", "input": "And?", "max_output_tokens": 4, "previous_response_id": first["id"]}
        assert live.post(following, "/v1/responses").json()["status"] in ("completed", "incomplete")
        live.replicas |= others
    assert found[0] == found[1]


def test_limits_are_those_of_one_server(live):
    statuses = [live.post(SHORT, key="asks").status_code for _ in range(10)]
    assert statuses == [200] * 6 + [429] * 4
    answers = [live.post({**SHORT, "prompt": "a" * 8, "max_tokens": 8}, key="reads") for _ in range(5)]
    assert [one.status_code for one in answers] == [200] * 3 + [429] * 2
    assert answers[0].headers["x-ratelimit-remaining-tokens"] == "44"
    assert live.post({**SHORT, "max_tokens": 100}, key="reads").json()["error"]["code"] == "tokens_exceeded"


def test_unused_tokens_are_given_back(live):
    with live.stream(SHORT):
        pass  # disconnects
    quota = live.keys._found[2].quota
    headers = {"Authorization": "Bearer 00000000-reads"}
    with httpx.stream("POST", f"{live.url}/v1/completions", json={**SHORT, "max_tokens": 50, "stream": True}, headers=headers) as answer:
        next(answer.iter_lines())
    live.settles()
    assert quota._tokens.left > 60 - 50


def test_the_queue_is_one_of_all_replicas(live):
    with ExitStack() as left:
        for _ in range(7):  # 4 slots, and 3 that wait
            answer, _ = left.enter_context(live.stream(LONG))
            assert answer.status_code == 200
        refused = live.post(SHORT)
        assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
    live.settles()
    assert live.post(SHORT).status_code == 200


def test_a_lost_replica_ends_its_own_requests_only(live):
    with ExitStack() as left:
        streams = [left.enter_context(live.stream({**LONG, "max_tokens": 700})) for _ in range(4)]
        for _, lines in streams:
            assert next(lines).startswith("data: {")
        assert live.running() == [2, 2]
        live.kill("replica0")
        ends = [list(filter(None, lines))[-1] for _, lines in streams]
        lost = [json.loads(one.removeprefix("data: "))["error"] for one in ends if one != "data: [DONE]"]
        assert [one["code"] for one in lost] == ["replica_lost"] * 2
        assert "Send the request again." in lost[0]["message"]
    assert live.post(SHORT).status_code == 200
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok", "replicas": 1}
    live.start("replica2")
    live.wait(lambda: httpx.get(f"{live.url}/health").json()["replicas"] == 2)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_request_of_a_lost_replica_may_be_sent_again(live, path):
    answers = []
    chat = {name: value for name, value in CHAT.items() if name != "ignore_eos"}
    body = LONG if "completions" in path else {**chat, "max_tokens": 4000}
    asking = threading.Thread(target=lambda: answers.append(live.post(body, path)))
    asking.start()
    live.wait(lambda: any(live.running()))
    for name in live.names:
        live.kill(name)
    asking.join()
    (answer,) = answers
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "Send the request again." in answer.json()["error"]["message"]
    live.wait(lambda: httpx.get(f"{live.url}/health").status_code == 503)
    assert live.post(SHORT).json()["error"]["code"] == "no_replica"


def test_streams_of_responses_end_with_an_event_of_their_api(live):
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 4000}
    with live.stream(body, "/v1/responses") as (_, lines):
        next(lines)
        for name in live.names:
            live.kill(name)
        rest = list(filter(None, lines))
    assert rest[-2] == "event: error" or "response.completed" in rest[-2]


def test_no_body_is_read_without_a_key(live):
    port = int(live.url.rpartition(":")[2])
    for path, status in (("/none", b"404"), ("/v1/completions", b"401")):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
            one.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n".encode())
            assert one.recv(100).startswith(b"HTTP/1.1 " + status)


def test_a_full_queue_takes_no_tokens(live):
    body = {**SHORT, "prompt": "a", "max_tokens": 4, "n": 8}  # more than 4 slots, and 3 that wait
    refused = live.post(body, key="reads")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) >= 59


def test_a_disconnect_frees_the_slots(live):
    with live.stream(LONG) as (_, lines):
        next(lines)
    live.settles()


def test_requests_that_come_together_spread_over_free_slots(live, monkeypatch):
    connect = Link.connect

    async def late(address, secret):
        await asyncio.sleep(0.2)
        return await connect(address, secret)

    monkeypatch.setattr(Link, "connect", late)
    with ThreadPoolExecutor(4) as threads, ExitStack() as left:
        for found in [threads.submit(lambda: left.enter_context(live.stream(LONG))) for _ in range(4)]:
            assert found.result()[0].status_code == 200
        assert [one.open for one in live.door._replicas.values()] == [2, 2]
    live.settles()


@pytest.mark.parametrize("streams", [False, True])
def test_a_whole_answer_frees_its_slot(live, monkeypatch, streams):
    get = Link.get

    async def late(link):
        kind, content = await get(link)
        if kind is Kind.END:
            await asyncio.sleep(0.5)
        return kind, content

    monkeypatch.setattr(Link, "get", late)
    assert live.post({**SHORT, "stream": streams}).status_code == 200
    assert live.door.running  # what the request used is not counted yet
    assert not live.door._completions
    assert [one.open for one in live.door._replicas.values()] == [0, 0]
    live.settles()


def test_the_end_drains(live):
    """Without waiting for all of an answer."""
    with live.stream({**LONG, "max_tokens": 100_000}) as (_, lines):
        next(lines)
        live.server.should_exit = True
        end = list(filter(None, lines))[-1]
        live.thread.join(60)
    assert not live.thread.is_alive()
    assert "shutting_down" in end


def test_the_end_of_a_whole_answer_is_an_error_that_says_so(live):
    answers = []
    asking = threading.Thread(target=lambda: answers.append(live.post({**LONG, "n": 2})))
    asking.start()
    live.wait(lambda: any(live.running()))
    live.by_loop(live.door.abort)
    asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")


def test_a_request_whose_link_is_made_while_the_server_ends_is_refused(live, monkeypatch):
    connect = Link.connect

    async def late(address, secret):
        link = await connect(address, secret)
        live.door.abort()
        return link

    monkeypatch.setattr(Link, "connect", late)
    answer = live.post(LONG)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    live.settles()


def test_metrics_are_of_all_replicas(live):
    for _ in range(3):
        live.post(SHORT)
    text = httpx.get(f"{live.url}/metrics").text
    found = dict(re.findall(r'^penstock_generated_tokens_total\{replica="(\w+)"\} (\S+)$', text, re.MULTILINE))
    assert set(found) == set(live.names)
    assert sum(map(float, found.values())) == 12
    assert "\npenstock_replicas 2.0\n" in text
    assert 'penstock_door_http_answers_total{path="/v1/completions",status="200"} 3.0' in text
    assert len(re.findall(r"^# TYPE penstock_slots ", text, re.MULTILINE)) == 1


def test_a_connection_without_the_secret_is_closed(live):
    async def asked(secret):
        link = await Link.connect(live.replicas["replica0"].about()["address"], secret)
        link.put(Kind.REQUEST, {})
        with pytest.raises(EOFError):
            await asyncio.wait_for(link.get(), 5)

    asyncio.run(asked(b"another one"))
    asyncio.run(asked(b"x" * 1000))


def test_conversations():
    def told(body, key="", **headers):
        return conversation(key, headers, json.dumps(body).encode())

    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    first = told({"messages": turns})
    assert first == told({"messages": [*turns, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}], "stream": True})
    assert first != told({"messages": [turns[0], {"role": "user", "content": "e"}]})
    assert first != told({"messages": turns}, key="other")
    assert told({"prompt": "a" * 5000}) == told({"prompt": "a" * 5000 + "b"}) != told({"prompt": "b"})
    assert told({"prompt": "a", "prompt_cache_key": "x"}) == told({"prompt": "b", "prompt_cache_key": "x"})
    assert told({"input": "a", "previous_response_id": "resp_1"}) is told({"prompt": "a", "state": "state-1"}) is None
    assert conversation("", {}, b"{") is conversation("", {}, b"[" * 10**4) is conversation("", {}, b"") is None
    large = json.dumps({"prompt": "a" * 2**17}).encode()
    assert conversation("", {}, large) == conversation("", {}, large + b"b")


def test_conversations_are_spread_and_stay():
    known = [Known(f"r{n}", ("", 0), 4) for n in range(4)]
    talks = [bytes([n, n]) for n in range(100)]
    first = [ranked(known, talk)[0].name for talk in talks]
    assert min(map(first.count, {one.name for one in known})) > 10
    left = [ranked(known[1:], talk)[0].name for talk in talks]
    assert all(before in ("r0", after) for before, after in zip(first, left))
    known[0].open = 4
    assert all(ranked(known, talk)[0] is not known[0] for talk in talks)
    assert ranked(known, None)[-1] is known[0]
