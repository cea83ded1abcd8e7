"""Faults of one request, of a step, and full queues: others go on, and slots come back."""

import asyncio
import gc
import math
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from architectures import model_of
from sampling import slow

from penstock.engine import Engine, SamplingParams
from penstock.engine.transfer import ToHost
from penstock.errors import DtypeError, EngineError, OutOfMemory, QueueFull, RangeError
from penstock.models.tokenizers import Bytes


class Text(Bytes):
    """Tokens of the small models as letters."""

    vocab_size = 13

    def __init__(self):
        self.end_of_text = None

    def encode(self, text, special=False, after=()):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens):
        return "".join(chr(ord("a") + token) for token in tokens)

    def stream(self, after=()):
        return Letters(self)


class Letters:
    def __init__(self, text):
        self.text = text

    def push(self, token):
        if self.text.end_of_text == "broken" and token == 4:
            raise ValueError("no letter for this token")
        return self.text.decode([token])

    def finish(self):
        return ""


PARAMS = SamplingParams(max_tokens=30, temperature=0)


def engine_of(**options) -> Engine:
    return Engine(model_of("gla"), **{"slots": 3, "token_budget": 200, **options})


def wait_for(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError


def assert_idle(engine):
    engine.check_integrity()
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)
    assert engine._pool.free == engine._pool.slots
    assert not engine._steps.requests


@pytest.mark.parametrize("overlap", [False, True])
def test_an_exception_in_post_processing_fails_one_request(overlap):
    wanted = engine_of().generate([[1, 2], [3]], PARAMS)
    engine = engine_of(overlap=overlap)

    def sink(request, event):
        if len(request.result.tokens) == 7:
            raise ValueError("this sink is broken")

    broken = engine.submit([5, 6], PARAMS, sink=sink)
    results = engine.generate([[1, 2], [3]], PARAMS)
    assert [one.tokens for one in results] == [one.tokens for one in wanted]
    assert broken.result.completions[0].finish_reason == "error"
    with pytest.raises(EngineError, match="this sink is broken"):
        raise broken.result.error
    assert_idle(engine)


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


def test_an_exception_in_a_tokenizer_fails_one_request():
    tokenizer = Text()
    tokenizer.end_of_text = "broken"
    engine = engine_of(tokenizer=tokenizer)
    good, bad = SamplingParams(max_tokens=9, logit_bias={4: -100.0}), SamplingParams(max_tokens=9, logit_bias={4: 100.0})
    results = engine.generate(["abc", "abc"], [good, bad])
    assert results[0].error is None
    assert len(results[0].text) == 9
    assert "no letter" in str(results[1].error)
    assert_idle(engine)


@pytest.mark.parametrize("made", [0, 2])
def test_a_decoder_that_cannot_be_made_fails_one_request(made):
    tokenizer = Text()
    engine = engine_of(tokenizer=tokenizer)
    plain, count = tokenizer.stream, []

    def broken(after):
        count.append(1)
        if len(count) == made + 1:
            raise ValueError("no decoder")
        return plain(after)

    tokenizer.stream = broken
    failed, other = engine.generate([[1], [2]], [SamplingParams(n=3), PARAMS])
    assert "ValueError: no decoder" in str(failed.error)
    assert [one.finish_reason for one in failed.completions] == ["error"] * 3
    assert (other.error, len(other.tokens)) == (None, 30)
    assert_idle(engine)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_fails_the_requests_of_the_step_alone(error, monkeypatch):
    engine = engine_of(slots=2)
    requests = [engine.submit([n + 1], PARAMS) for n in range(4)]
    for _ in range(3):
        engine.step()
    whole = engine.model.advance

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(engine.model, "advance", fail)
    assert engine.step()  # the other requests wait
    monkeypatch.setattr(engine.model, "advance", whole)
    assert [request.done for request in requests] == [True, True, False, False]
    for request in requests[:2]:
        with pytest.raises(OutOfMemory, match="must fit into memory"):
            raise request.result.error
    while not all(request.done for request in requests):
        engine.step()
    wanted = engine_of().generate([[3], [4]], PARAMS)
    assert [request.result.tokens for request in requests[2:]] == [one.tokens for one in wanted]
    assert_idle(engine)


def test_biases_that_the_caller_changes_behind_submit_change_nothing():
    engine, biases = engine_of(), {3: 50.0}
    request, other = engine.submit([1], SamplingParams(max_tokens=3, logit_bias=biases)), engine.submit([1], PARAMS)
    biases.clear()
    while not (request.done and other.done):
        engine.step()
    assert request.result.tokens == [3] * 3
    assert other.result.error is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_state_that_cannot_be_written_fails_its_request_alone(overlap):
    engine = engine_of(overlap=overlap)
    wanted = engine_of().generate([[1, 2], [3]], PARAMS)
    requests = [engine.submit([1, 2], PARAMS), engine.submit([3], PARAMS)]
    for _ in range(3):
        engine.step()
    state = engine.state_of(requests[0])
    broken = engine.submit([5], PARAMS, state=replace(state, row=state.row[:-1]))
    while not all(request.done for request in (*requests, broken)):
        engine.step()
    assert [request.result.tokens for request in requests] == [one.tokens for one in wanted]
    with pytest.raises(EngineError, match="a step must run"):
        raise broken.result.error
    assert_idle(engine)


def test_an_error_of_a_step_that_overlaps_the_end_of_a_request_leaves_it_as_it_is(monkeypatch):
    """The step has a row of it because its end was not known when the step began."""
    engine = engine_of(overlap=True)
    ended = engine.submit([1], SamplingParams(max_tokens=30, stop_ids=tuple(range(13))))
    other = engine.submit([1, 2], PARAMS)
    engine.step()
    engine.step()
    assert ended.done
    assert len(other.result.tokens) == 1

    def fail(_):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(ToHost, "tolist", fail)
    engine.step()
    assert (ended.result.error, ended.result.completions[0].finish_reason) == (None, "stop")
    with pytest.raises(EngineError, match="the device is lost"):
        raise other.result.error
    assert_idle(engine)


def test_another_error_of_a_step_fails_its_requests(monkeypatch):
    engine = engine_of()
    request = engine.submit([1], PARAMS)

    def fail(*_, **__):
        raise RuntimeError("a kernel is broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "advance", fail)
        engine.step()
    with pytest.raises(EngineError, match="a kernel is broken"):
        raise request.result.error
    assert engine.generate([[1]], PARAMS)[0].error is None
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


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "n": 2}, {"seed": 1, "presence_penalty": 1.0, "logprobs": 2}],
    ids=str,
)  # fmt: skip
def test_logits_that_are_no_numbers_fail_their_request_alone(options, overlap):
    model = model_of("gla")
    params = SamplingParams(max_tokens=20, logit_bias={7: -math.inf}, **options)
    wanted = [[one.tokens for one in result.completions] for result in engine_of().generate([[1, 2], [3]], params)]
    with torch.no_grad():
        kept = model.embeddings.weight[7].clone()
        model.embeddings.weight[7] = math.nan
    try:
        engine = Engine(model, slots=3, token_budget=200, overlap=overlap)
        results = engine.generate([[1, 2], [5, 7, 5], [3]], params)
        (scored,) = engine.generate([[7, 5]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    finally:
        with torch.no_grad():
            model.embeddings.weight[7] = kept
    assert [[one.tokens for one in results[n].completions] for n in (0, 2)] == wanted
    assert results[1].tokens == []
    assert {one.finish_reason for one in results[1].completions} == {"error"}
    assert isinstance(results[1].error, EngineError)
    assert str(results[1].error).startswith("engine: logits must have a finite largest value among the tokens that may follow, got NaN")
    assert str(scored.error).startswith("engine: logits must be numbers, got NaN among those after tokens 0 to 1.")
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_fails_where_a_state_is_kept_fails_alone(overlap, monkeypatch):
    """Its 64th token has no value, and the state after it is computed with the step before, if steps overlap."""
    wanted = engine_of().generate([[1, 2]], SamplingParams(max_tokens=100, temperature=0))
    engine = engine_of(overlap=overlap, keep_every=64)
    broken, forward = engine.submit([5], SamplingParams(max_tokens=100, temperature=0)), engine._steps.runner._forward

    def with_nan(decodes, pieces, last_only):
        logits = forward(decodes, pieces, last_only).clone()
        for n, work in enumerate([*decodes, *pieces]):
            if work.sequence.request is broken and work.end == 63:
                logits[n] = math.nan
        return logits

    monkeypatch.setattr(engine._steps.runner, "_forward", with_nan)
    results = engine.generate([[1, 2]], SamplingParams(max_tokens=100, temperature=0))
    assert [one.tokens for one in results] == [one.tokens for one in wanted]
    assert str(broken.result.error).startswith("engine: logits must have a finite largest value")
    assert_idle(engine)


@pytest.mark.parametrize("bias", [-math.inf, 3e38])
@pytest.mark.parametrize("temperature", [0, 1])
def test_biases_that_leave_no_token_fail_their_request_alone(bias, temperature):
    engine = engine_of()
    params = SamplingParams(max_tokens=5, temperature=temperature, seed=1)
    (wanted,) = engine.generate([[1]], params)
    if bias > 0:  # the penalty makes it infinite
        broken = SamplingParams(max_tokens=5, temperature=temperature, logit_bias={3: bias}, repetition_penalty=0.1)
    else:
        broken = SamplingParams(max_tokens=5, temperature=temperature, logit_bias=dict.fromkeys(range(13), bias))
    found = engine.generate([[3], [1]], [broken, params])
    assert (found[0].tokens, found[1].tokens) == ([], wanted.tokens)
    with pytest.raises(EngineError, match="logits must have a finite largest value"):
        raise found[0].error
    assert_idle(engine)


def test_wrong_arguments_are_refused():
    engine = engine_of()
    for prompt, params, said in [
        ([99], {}, "prompt must be tokens from 0 to 12"),
        ([], {}, "at least one token"),
        ([1], {"stop": ("a",)}, "stop must be empty"),
        ([1], {"logit_bias": {2: 1.0, 13: 1.0}}, "submit: logit_bias must be of tokens from 0 to 12, got one of token 13"),
        ([1], {"stop_ids": (2, 13)}, "submit: stop_ids must be tokens from 0 to 12, got 13"),
        ([1], {"stop_ids": (2, -1)}, "SamplingParams: stop_ids must be tokens of at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=said):
            engine.submit(prompt, SamplingParams(**params))
    for given, said in [
        ({"prompt": 5}, "prompt must be a text or a list of tokens, got 5 of type int"),
        ({"prompt": b"ab"}, "prompt must be a text or a list of tokens, got b'ab' of type bytes"),
        ({"prompt": {1: 2}}, "prompt must be a text or a list of tokens, got {1: 2} of type dict"),
        ({"sink": 3}, "sink must be a callable or None, got 3"),
        ({"prompt": [None]}, "prompt must be tokens from 0 to 12, of type int, got None"),
        ({"prompt": torch.tensor([1])}, r"prompt must be tokens from 0 to 12, of type int, got tensor\(1\).*tolist"),
        ({"prompt": [True]}, "prompt must be tokens from 0 to 12, of type int, got True of type bool"),
        ({"priority": "high"}, "priority must be a whole number, got 'high'"),
        ({"priority": float("nan")}, "priority must be a whole number, got nan"),
        ({"boundaries": ("a",)}, "boundaries must be a list of positions"),
        ({"boundaries": 64}, "boundaries must be a list of positions"),
        ({"state": "a"}, "state must be a SequenceState or None, got 'a'"),
    ]:
        with pytest.raises(DtypeError, match=said):
            engine.submit(**{"prompt": [1], **given})
    for position in (-1, 3):
        with pytest.raises(RangeError, match=f"boundaries must be positions in the prompt, from 0 to 2, got {position}"):
            engine.submit([1, 2], boundaries=(0, 2, position))
    for call in (engine.cancel, engine.fork, engine.state_of):
        with pytest.raises(DtypeError, match=r"request must be a Request, got None\. submit returns one"):
            call(None)
    with pytest.raises(DtypeError, match="save_state: state must be a SequenceState, got None"):
        engine.save_state(None, "state")
    with pytest.raises(
        OutOfMemory, match=r"Engine: slots must fit into memory with two states of \d+ bytes each, got 10{12} \(.* GiB\)\. Lower"
    ):
        engine_of(slots=10**12, token_budget=2 * 10**12)
    for name in ("batch_invariant", "overlap", "cuda_graphs"):
        with pytest.raises(DtypeError, match=f"{name} must be True.* False.*, got 'yes' of type str"):
            engine_of(**{name: "yes"})
    for prompts in (None, 5, torch.tensor([1, 2]), {}):
        with pytest.raises(DtypeError, match="generate: prompts must be a text, a list of tokens, or a list of such"):
            engine.generate(prompts)
    assert engine.generate([]) == []
    with pytest.raises(RangeError, match="max_queue must be a whole number of at least 1, got 0"):
        engine_of(max_queue=0)
    with pytest.raises(RangeError, match=r"token_budget must be at least slots \+ 64"):
        engine_of(token_budget=60)
    with pytest.raises(RangeError, match=r"prompt_budget must be a whole number of at least 64, got 63"):
        engine_of(prompt_budget=63)
    with pytest.raises(TypeError, match="because the engine has no tokenizer"):
        engine.generate("text")


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
