"""``/v1/completions`` with OpenAI's own client: every parameter, whole and streamed."""

import math
import threading
from itertools import chain

import openai
import pytest
from sampling import every

from penstock.server.logprobs import CompletionWriter

PROMPT = "Once upon a time"


def joined(stream):
    """Of each choice of a stream: text, tokens of its log probabilities, reason of the end. And the usage."""
    texts, tokens, offsets, reasons, usage = {}, {}, {}, {}, None
    for piece in stream:
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                tokens[choice.index] = tokens.get(choice.index, []) + list(zip(choice.logprobs.tokens, choice.logprobs.token_logprobs))
                offsets[choice.index] = offsets.get(choice.index, []) + choice.logprobs.text_offset
            assert choice.index not in reasons
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    return texts, tokens, offsets, reasons, usage


PARAMS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.7},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {"65": 100, "66": 99}},
    "top_k": {"extra_body": {"top_k": 3}},
    "min_p": {"extra_body": {"min_p": 0.1}},
    "repetition": {"extra_body": {"repetition_penalty": 1.7}},
    "stop": {"stop": ["e", "a"], "extra_body": {"ignore_eos": True}, "max_tokens": 400},
    "stop_ids": {"extra_body": {"stop_token_ids": [5, 6, 7, 8]}, "max_tokens": 200},
    "several": {"n": 3},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "echo_logprobs": {"echo": True, "logprobs": 2, "n": 2},
}


@pytest.mark.parametrize("name", every(2, PARAMS))
def test_parameters_reach_the_engine_and_a_stream_equals_the_whole(client, expected, name):
    given = {"max_tokens": 30, "seed": 7, **PARAMS[name]}
    extra = given.pop("extra_body", {})
    whole = client.completions.create(model="tiny", prompt=PROMPT, **given, extra_body=extra)
    params = {**given, **extra}
    echo = params.pop("echo", False)
    params["stop"] = tuple(params.get("stop", ()))
    params["logit_bias"] = {int(token): bias for token, bias in params.get("logit_bias", {}).items()}
    params["stop_ids"] = tuple(params.pop("stop_token_ids", ()))
    params["ignore_end"] = params.pop("ignore_eos", False)
    if echo:
        params["prompt_logprobs"] = params.get("logprobs")
    wanted = expected(PROMPT, **params)
    begin = PROMPT if echo else ""
    assert [choice.text for choice in whole.choices] == [begin + one.text for one in wanted.completions]
    assert [choice.finish_reason for choice in whole.choices] == [one.finish_reason for one in wanted.completions]
    assert whole.usage.prompt_tokens == len(PROMPT)
    assert whole.usage.completion_tokens == sum(len(one.tokens) for one in wanted.completions)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, **given, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    texts, tokens, offsets, reasons, usage = joined(stream)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        if choice.logprobs is None:
            assert not tokens
            continue
        assert [token for token, _ in tokens[choice.index]] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset
        for (_, one), other in zip(tokens[choice.index], choice.logprobs.token_logprobs):
            assert one == other or abs(one - other) < 1e-4


def test_logprobs_of_prompt_and_completion(client):
    (choice,) = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=2, echo=True, temperature=0).choices
    found = choice.logprobs
    assert found.tokens[:3] == ["a", "b", "c"]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 8
    assert found.text_offset[:4] == [0, 1, 2, 3]
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs))[3:]:
        assert len(top) == 2
        assert max(top, key=top.get) == token  # greedy
        assert math.isclose(top[token], logprob)


def test_log_probabilities_of_a_long_prompt_leave_the_server_free(client, monkeypatch):
    """They take seconds: the whole answer is written in a thread of its own, and a stream in pieces."""
    threads, write = set(), CompletionWriter.write
    monkeypatch.setattr(CompletionWriter, "write", lambda *given: threads.add(threading.get_ident()) or write(*given))
    given = {"model": "tiny", "prompt": [n * n % 97 for n in range(2000)], "max_tokens": 2, "echo": True, "logprobs": 5, "temperature": 0}
    whole = client.completions.create(**given).choices[0]
    served = threads.copy()
    pieces = [one.choices[0] for one in client.completions.create(**given, stream=True)]
    assert not served & (threads - served)
    assert max(len(one.logprobs.tokens) for one in pieces) <= 256
    assert "".join(one.text for one in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [*chain.from_iterable(getattr(one.logprobs, name) for one in pieces)] == getattr(whole.logprobs, name)


def test_a_prompt_is_scored_without_new_tokens(client, expected):
    found = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=0, logprobs=0, echo=True)
    wanted = expected([1, 2, 3], max_tokens=0, prompt_logprobs=0).prompt_logprobs
    assert found.choices[0].logprobs.token_logprobs == [None, *(one.logprob for one in wanted[1:])]
    assert found.choices[0].text == "\x01\x02\x03"
    assert found.usage.completion_tokens == 0


def test_several_prompts_keep_their_order(client, expected):
    prompts = ["one", "two and more", "three"]
    for given in (prompts, [list(one.encode()) for one in prompts]):
        found = client.completions.create(model="tiny", prompt=given, n=2, seed=3, max_tokens=9)
        assert [choice.index for choice in found.choices] == list(range(6))
        wanted = [one.text for prompt in prompts for one in expected(prompt, n=2, seed=3, max_tokens=9).completions]
        assert [choice.text for choice in found.choices] == wanted
        stream = client.completions.create(model="tiny", prompt=given, n=2, seed=3, max_tokens=9, stream=True)
        assert [text for _, text in sorted(joined(stream)[0].items())] == wanted


def test_an_empty_prompt_begins_with_the_end_of_text(client, expected):
    found = client.completions.create(model="tiny", prompt="", max_tokens=5, temperature=0)
    assert found.choices[0].text == expected([256], max_tokens=5, temperature=0).text


def test_a_repeated_prompt_comes_from_the_cache(client):
    prompt = "x" * 200
    client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 192


def test_nulls_are_as_absent(client):
    found = client.completions.create(model="tiny", prompt="a", max_tokens=2, stop=None, extra_body={"suffix": None, "seed": None})
    assert found.object == "text_completion"


def test_models(client):
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model must be 'tiny', got 'huge'"):
        client.models.retrieve("huge")


WRONG = {
    "temperature": ({"temperature": 3}, "temperature must be less than or equal to 2, got 3", "temperature"),
    "top_p": ({"top_p": 0}, "top_p must be greater than 0", "top_p"),
    "n": ({"n": 17}, "n must be at most 16, got 17", "n"),
    "max_tokens": ({"max_tokens": 5000}, "max_tokens must be at most 4096, got 5000", "max_tokens"),
    "logprobs": ({"logprobs": 21}, "logprobs must be less than or equal to 20", "logprobs"),
    "stop": ({"stop": ""}, "stop must be a text or a list of texts", "stop"),
    "stops": ({"stop": ["a"] * 17}, "the number of stop texts must be at most 16, got 17", "stop"),
    "stop ids": ({"extra_body": {"stop_token_ids": [1] * 1025}}, "the number of stop tokens must be at most 1024", "stop_token_ids"),
    "long stop": ({"stop": "a" * 257}, "the length of a stop text must be at most 256", "stop"),
    "bias": ({"logit_bias": {"300": 1}}, "tokens of logit_bias must be at most 256, got 300", "logit_bias"),
    "biases": ({"logit_bias": {"1": 101}}, "less than or equal to 100", "logit_bias.1"),
    "prompt": ({"prompt": [300]}, "prompt must be tokens from 0 to 256, got 300", "prompt"),
    "prompts": ({"prompt": ["a"] * 65}, "the number of prompts must be at most 64, got 65", "prompt"),
    "no tokens": ({"prompt": []}, "prompt must be a text", "prompt"),
    "long prompt": ({"prompt": "a" * 200_000}, "the prompt's tokens must be at most 131072, got 200000", "prompt"),
    "unknown": ({"extra_body": {"temprature": 1}}, "temprature must be absent, got 1", "temprature"),
    "penalty": ({"extra_body": {"repetition_penalty": 1e-320}}, "must be greater than or equal to 0.01", "repetition_penalty"),
    "echoed token": ({"prompt": [300], "echo": True}, "prompt must be from 0 to 256, got 300", "prompt"),
    "type": ({"extra_body": {"n": "2"}}, "n must be a valid integer, got '2'", "n"),
    "many states": ({"prompt": ["a"] * 5, "n": 16, "extra_body": {"save_state": True}}, "save_state must be of at most 64", "save_state"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused_by_name(client, name):
    given, message, param = WRONG[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "a", **given})
    assert message in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"
    if param is not None:
        assert caught.value.param == param


def test_another_model_is_refused(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="huge", prompt="a")
    assert caught.value.code == "model_not_found"
