"""Sampling parameters beyond OpenAI's, at both endpoints."""

import openai
import pytest

ENDPOINTS = {
    "completions": (lambda client: client.completions, {"model": "tiny", "prompt": "Hi"}),
    "chat": (lambda client: client.chat.completions, {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
}


@pytest.fixture(params=ENDPOINTS)
def create(request, client):
    """Send a request to an endpoint."""
    find, base = ENDPOINTS[request.param]
    extra = {"min_tokens", "prompt_logprobs"}

    def call(**given):
        body = {name: value for name, value in given.items() if name in extra}
        return find(client).create(**base, **{name: value for name, value in given.items() if name not in extra}, extra_body=body)

    return call


def test_min_tokens(create):
    found = create(max_tokens=30, min_tokens=12, logit_bias={"256": 100}, n=2)
    assert found.usage.completion_tokens == 2 * 13
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    found = create(max_tokens=30, min_tokens=12, stop=["a"], logit_bias={"97": 100})
    assert found.usage.completion_tokens == 13
    with pytest.raises(openai.BadRequestError, match="min_tokens must be at most max_tokens = 3, got 4"):
        create(max_tokens=3, min_tokens=4)


def scores_of(found):
    """Those of a prompt, in both endpoints."""
    listed = found.prompt_logprobs if hasattr(found, "prompt_logprobs") else found.choices[0].prompt_logprobs
    assert listed[0] is None
    return listed[1:]


@pytest.mark.parametrize("most", [0, 3])
def test_prompt_logprobs(create, client, most):
    found = create(max_tokens=1, prompt_logprobs=most, temperature=0)
    scores, text = scores_of(found), b"User: Hi\n\nAssistant:" if hasattr(found.choices[0], "message") else b"Hi"
    assert len(scores) == len(text) - 1 == found.usage.prompt_tokens - 1
    wanted = client.completions.create(model="tiny", prompt=[*text], max_tokens=0, echo=True, logprobs=most).choices[0].logprobs
    for token, one, logprob, top in zip(text[1:], scores, wanted.token_logprobs[1:], wanted.top_logprobs[1:]):
        (first, itself), *_ = one.items()
        assert (first, itself["logprob"], itself["decoded_token"]) == (str(token), logprob, chr(token))
        ranked = sorted((other for other in one.values() if other["rank"]), key=lambda other: other["rank"])
        assert [other["rank"] for other in ranked] == [*range(1, most + 1)]
        assert {other["decoded_token"]: other["logprob"] for other in ranked} == top
        assert itself["rank"] is None or itself in ranked
    plain = create(max_tokens=1, temperature=0)
    assert not hasattr(plain, "prompt_logprobs")
    assert not hasattr(plain.choices[0], "prompt_logprobs")


def test_prompt_logprobs_beside_an_echo(client):
    given = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "temperature": 0, "echo": True}
    alone = client.completions.create(**given, logprobs=1).choices[0].logprobs
    for most in (0, 4):
        found = client.completions.create(**given, logprobs=1, extra_body={"prompt_logprobs": most}).choices[0]
        assert found.logprobs == alone
        assert all(most <= len(one) <= most + 1 for one in found.prompt_logprobs[1:])


def test_prompt_logprobs_are_refused_in_streams(create):
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs must be absent with stream, got 1") as caught:
        create(max_tokens=1, prompt_logprobs=1, stream=True)
    assert caught.value.param == "prompt_logprobs"
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs must be less than or equal to 20, got 21"):
        create(max_tokens=1, prompt_logprobs=21)


@pytest.mark.parametrize("last", [False, True])
def test_counts_of_tokens_in_every_piece(create, last):
    given = {"max_tokens": 40, "n": 2, "seed": 3, "temperature": 1.0}
    options = {"include_usage": last, "continuous_usage_stats": True}
    pieces = list(create(**given, stream=True, stream_options=options))
    counts = [one.usage.completion_tokens for one in pieces]
    whole = create(**given).usage
    assert counts == sorted(counts)
    assert counts[0] < whole.completion_tokens / 2  # the engine may be a few tokens ahead of the first piece
    assert counts[-1] == whole.completion_tokens
    assert {one.usage.prompt_tokens for one in pieces} == {whole.prompt_tokens}
    assert (pieces[-1].choices == []) == last
    assert all(one.usage is None for one in create(**given, stream=True, stream_options={"continuous_usage_stats": False}))
