"""Faults of one request and of a step: others go on, and slots come back."""

import math
from dataclasses import replace

import pytest
import torch
from architectures import model_of
from faulty_engines import PARAMS, Text, assert_idle, engine_of

from penstock.engine import Engine, SamplingParams
from penstock.engine.transfer import ToHost
from penstock.errors import DtypeError, EngineError, OutOfMemory, RangeError


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
