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
