"""How requests end early: sinks and streams that are left, cancelled requests, full queues, engines that are closed or dropped."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path

import pytest
from architectures import model_of
from faulty_engines import PARAMS, Text, assert_idle, engine_of, wait_for
from sampling import slow

from penstock.engine import Engine, SamplingParams
from penstock.errors import EngineError, QueueFull


def broken_sink(*_):
    raise ValueError("this sink is broken")


@pytest.mark.parametrize("count", [1, *slow(0, 1000)])
def test_a_sink_that_always_raises_fails_one_request(count):
    engine = engine_of(slots=6)
    with engine:
        engine.start()
        other = engine.submit([1, 2], SamplingParams(max_tokens=500, temperature=0))
        broken = engine.submit([5, 6], SamplingParams(max_tokens=count, n=3), sink=broken_sink)
        wait_for(lambda: broken.done)
        with pytest.raises(EngineError, match="this sink is broken"):
            raise broken.result.error
        wait_for(lambda: other.done)
        assert other.result.error is None
        assert engine.alive
    assert_idle(engine)


def test_a_sink_that_raises_when_its_request_is_cancelled_fails_nothing_else():
    with engine_of() as engine:
        engine.start()

        def sink(request, event):
            if event.finish_reason == "cancelled":
                raise ValueError("this sink is broken")

        requests = [engine.submit([n], SamplingParams(max_tokens=10**6, n=2), sink=sink) for n in range(3)]
        wait_for(lambda: requests[0].result.tokens)
        engine.cancel(requests[0])
        engine.cancel(requests[2])  # it waits
        wait_for(lambda: requests[0].done and requests[2].done)
        assert {one.finish_reason for one in requests[0].result.completions} == {"cancelled"}
        assert engine.generate([[1]], PARAMS)[0].error is None
        assert engine.alive
    assert requests[1].done
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("action", ["fork", "step", "generate", "submit", "cancel", "close"])
def test_a_sink_may_call_the_engine(action, overlap):
    prompts, params = [[1, 2], [3], [4, 5]], SamplingParams(max_tokens=30, seed=3)
    wanted = [one.tokens for one in engine_of(slots=5).generate(prompts, params)]
    engine, made, seen = engine_of(slots=5, overlap=overlap), [], []
    calls = {
        "fork": lambda request: made.append(engine.fork(request)),
        "step": lambda _: engine.step(),
        "generate": lambda _: engine.generate([[3]], params),
        "submit": lambda _: made.append(engine.submit([3], params)),
        "cancel": lambda _: engine.cancel(other),
        "close": lambda _: engine.close(),
    }

    def sink(request, event):
        if len(seen) == 7:
            calls[action](request)
        seen.extend(event.tokens)

    other = engine.submit([9], SamplingParams(max_tokens=1000))
    requests = [engine.submit(prompt, params, sink=sink if n == 1 else None) for n, prompt in enumerate(prompts)]
    while not all(request.done for request in requests + made):
        engine.step()
    tokens = [request.result.tokens for request in requests]
    assert seen == tokens[1]
    if action == "close":
        assert tokens == [one[: len(found)] for one, found in zip(wanted, tokens)]
        assert requests[1].result.completions[0].finish_reason == "cancelled"
    else:
        assert tokens == wanted
        assert requests[1].result.error is None
        assert all([*one.prompt, *one.result.tokens][:31] == [3, *wanted[1]] for one in made)
    assert other.done == (action in ("cancel", "close"))
    engine.cancel(other)
    engine.step()
    assert_idle(engine)


def test_a_request_is_cancelled_before_it_is_seen():
    """Its ``submit`` and ``cancel`` come while the engine cancels another."""
    engine = engine_of()
    plain, requests = engine._steps.cancel, []

    def cancel(request):
        if not requests:
            requests.append(engine.submit([2], PARAMS))
            engine.cancel(requests[0])
        plain(request)

    engine._steps.cancel = cancel
    engine.cancel(engine.submit([1], PARAMS))
    engine.step()
    assert requests[0].result.completions[0].finish_reason == "cancelled"
    assert_idle(engine)


def test_a_request_of_another_engine_is_not_cancelled():
    engine, other = engine_of(), engine_of()
    request = other.submit([1], PARAMS)
    other.step()
    engine.cancel(request)
    engine.step()
    while not request.done:
        other.step()
    assert request.result.completions[0].finish_reason == "length"
    assert_idle(engine)
    assert_idle(other)


def test_a_stream_whose_event_loop_is_closed_frees_its_slot():
    engine = engine_of()
    with engine:
        loop = asyncio.new_event_loop()
        stream = engine.stream([1], SamplingParams(max_tokens=10**6))
        loop.run_until_complete(anext(stream))
        loop.close()
        wait_for(lambda: engine.stats.running == 0)
        assert engine.generate([[1]], PARAMS)[0].error is None
        assert engine.alive
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["advance", "process"])
def test_an_interrupt_ends_the_requests_of_its_call(place, overlap, monkeypatch):
    wanted = engine_of().generate([[1, 2]], PARAMS)[0].tokens
    engine, count = engine_of(overlap=overlap, slots=2), []

    def interrupted(function):
        def called(*given, **options):
            count.append(1)
            if len(count) == 5:
                raise KeyboardInterrupt
            return function(*given, **options)

        return called

    with monkeypatch.context() as patch:
        owner, name = (engine.model, "advance") if place == "advance" else (engine._steps, "_accept")
        patch.setattr(owner, name, interrupted(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2], [3], [4]], PARAMS)
    assert_idle(engine)
    assert engine.generate([[1, 2]], PARAMS)[0].tokens == wanted


def test_a_request_that_comes_while_the_engine_closes_is_cancelled():
    engine = engine_of()

    class Late(deque):
        def append(self, request):
            engine.close()
            super().append(request)

    engine._inbox._requests = Late()
    request = engine.submit([1], PARAMS)
    assert request.result.completions[0].finish_reason == "cancelled"
    assert_idle(engine)


def test_a_full_queue_refuses_requests():
    engine = engine_of(slots=1, max_queue=2)
    requests = [engine.submit([1], PARAMS) for _ in range(2)]
    with pytest.raises(QueueFull, match="at most 2"):
        engine.submit([1], PARAMS)
    while not all(request.done for request in requests):
        engine.step()
    engine.submit([1], PARAMS)
    engine.close()
    assert_idle(engine)


def test_cancelled_requests_free_their_slots():
    engine = engine_of(slots=2)
    running, forked, waiting = (engine.submit([1], SamplingParams(max_tokens=1000, n=n)) for n in (1, 4, 1))
    for _ in range(5):
        engine.step()
    for request in (waiting, forked, running):
        engine.cancel(request)
        engine.step()
        assert {one.finish_reason for one in request.result.completions} == {"cancelled"}
    engine.cancel(running)
    engine.step()
    assert_idle(engine)


def test_streams_give_events_as_they_come_and_may_be_left():
    async def whole(engine, prompt, params):
        return [event async for event in engine.stream(prompt, params)]

    async def left(engine):
        count = 0
        stream = engine.stream("abc", SamplingParams(max_tokens=10**6))
        async for _ in stream:
            count += 1
            if count == 5:
                break
        await stream.aclose()

    async def main(engine):
        params = [SamplingParams(max_tokens=20, seed=n, n=1 + n % 2, logprobs=1) for n in range(6)]
        *streams, _ = await asyncio.gather(*(whole(engine, "abcd"[n % 3 :], one) for n, one in enumerate(params)), left(engine))
        return params, streams

    with engine_of(tokenizer=Text()) as engine:
        params, streams = asyncio.run(main(engine))
        for n, (one, events) in enumerate(zip(params, streams)):
            (result,) = engine.generate(["abcd"[n % 3 :]], one)
            for index, completion in enumerate(result.completions):
                own = [event for event in events if event.index == index]
                assert [token for event in own for token in event.tokens] == completion.tokens
                assert "".join(event.text for event in own) == completion.text
                assert [found.token for event in own for found in event.logprobs] == completion.tokens
                assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [completion.finish_reason]
    assert_idle(engine)


def test_a_stream_that_fails_raises():
    async def main(engine):
        async for _ in engine.stream([1], PARAMS):
            pass

    with engine_of() as engine:

        def fail(*_, **__):
            raise RuntimeError("a kernel is broken")

        engine.model.advance = fail
        with pytest.raises(EngineError, match="a kernel is broken"):
            asyncio.run(main(engine))
    assert_idle(engine)
    with pytest.raises(EngineError, match="must be open"):
        engine.submit([1], PARAMS)


@pytest.mark.parametrize("count", [1, *slow(3)])  # where the thread is at the end is a matter of chance
def test_a_process_may_end_without_closing_its_engine(count):
    script = """
from architectures import model_of
from penstock.engine import Engine, SamplingParams

engine = Engine(model_of("gla"), slots=3, token_budget=200)
engine.start()
requests = [engine.submit([1], SamplingParams(max_tokens=10**9)) for _ in range(5)]
while not requests[0].result.tokens:
    pass
"""
    folder = Path(__file__).parents[1] / "support"
    started = [subprocess.Popen([sys.executable, "-c", script], cwd=folder, stderr=subprocess.PIPE, text=True) for _ in range(count)]
    assert [(one.communicate(timeout=300)[1], one.returncode) for one in started] == [("", 0)] * count


@pytest.mark.parametrize("count", [1, 400])
def test_a_started_engine_that_is_dropped_ends_its_requests_and_is_collected(count):
    before = threading.active_count()
    engine = engine_of()
    engine.start()
    left, request = weakref.ref(engine), engine.submit([1, 2], SamplingParams(max_tokens=count))
    if count == 1:
        wait_for(lambda: request.done)
    del engine
    wait_for(lambda: request.done)
    assert (len(request.result.tokens), request.result.error) == (count, None)
    wait_for(lambda: gc.collect() is None or left() is None)
    wait_for(lambda: threading.active_count() <= before)


def test_a_sink_closes_an_engine_with_a_background_thread():
    """The thread that calls the sink holds the lock of steps, for which the background thread may wait."""
    engine = Engine(model_of("gla"), slots=2, token_budget=128)

    def run():
        request = engine.submit([1, 2], SamplingParams(max_tokens=100), sink=lambda *_: (engine.start(), time.sleep(0.05), engine.close()))
        while not request.done:
            engine.step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    engine.close()
    assert not engine.alive
    engine.check_integrity()
