"""``/v1/chat/completions`` with OpenAI's own client."""

import openai
import pytest

from penstock.server.protocol import Message
from penstock.server.templates import WorldTemplate

MESSAGES = [
    {"role": "system", "content": "Be\n\nbrief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
]
PROMPT = "System: Be\nbrief.\n\nUser: Hi there\n\nAssistant:"


def joined(stream):
    """Of each answer of a stream: text, log probabilities, reason of the end. And the usage."""
    texts, logprobs, reasons, roles, usage = {}, {}, {}, {}, None
    for piece in stream:
        usage = piece.usage or usage
        for choice in piece.choices:
            if choice.delta.role is not None:
                assert choice.index not in roles
                roles[choice.index] = choice.delta.role
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs[choice.index] = logprobs.get(choice.index, []) + choice.logprobs.content
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    assert set(roles.values()) <= {"assistant"}
    return texts, logprobs, reasons, usage


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_is_the_completion_of_the_rendered_messages(client, expected, n):
    assert WorldTemplate().render([Message.model_validate(one) for one in MESSAGES]) == PROMPT
    given = {"n": n, "seed": 11, "max_tokens": 40, "temperature": 0.9}
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **given)
    wanted = expected(PROMPT, stop=("\n\nUser:",), **given)
    assert [choice.message.content for choice in whole.choices] == [one.text.lstrip() for one in wanted.completions]
    assert [choice.finish_reason for choice in whole.choices] == [one.finish_reason for one in wanted.completions]
    assert {choice.message.role for choice in whole.choices} == {"assistant"}
    assert whole.usage.prompt_tokens == len(PROMPT)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, **given, stream=True, stream_options={"include_usage": True})
    texts, _, reasons, usage = joined(stream)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.total_tokens == whole.usage.total_tokens


def test_white_space_before_an_answer_is_left_out_of_streams_too(client):
    given = {"model": "tiny", "messages": MESSAGES, "logit_bias": {"32": 100}, "max_tokens": 5}
    given["extra_body"] = {"repetition_penalty": 1.0}
    assert client.chat.completions.create(**given).choices[0].message.content == ""
    assert joined(client.chat.completions.create(**given, stream=True))[0] == {0: ""}


def test_logprobs(client):
    given = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 6, "temperature": 0}
    found = client.chat.completions.create(**given).choices[0].logprobs.content
    assert len(found) == 6
    for one in found:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].token == one.token  # greedy
        assert one.bytes == ([int(one.token[8:], 16)] if one.token.startswith("bytes:") else list(one.token.encode()))
    streamed = joined(client.chat.completions.create(**given, stream=True))[1][0]
    assert [one.token for one in streamed] == [one.token for one in found]
    assert client.chat.completions.create(**{**given, "top_logprobs": None}).choices[0].logprobs.content[0].top_logprobs == []


def test_both_names_of_the_limit_of_tokens(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **{name: 3}, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 3


WRONG = {
    "no messages": ({"messages": []}, "messages must have at least 1 item", "messages"),
    "role": ({"messages": [{"role": "judge", "content": "a"}]}, "messages.0.role must be 'system', 'developer', 'user'", "messages.0.role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
        "messages.0.content must be a text or a list of parts of type text", "messages.0.content",
    ),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs must be given with logprobs only", "top_logprobs"),
    "limits": (
        {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens must be absent or max_completion_tokens = 2, got 1", "max_tokens",
    ),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "content must be given with role user, got none", "messages.0"),
    "many": ({"messages": [{"role": "user", "content": "a"}] * 1025}, "the number of messages must be at most 1024, got 1025", "messages"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused_by_name(client, name):
    given, message, param = WRONG[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **given})
    assert message in caught.value.body["message"]
    if param is not None:
        assert caught.value.param == param
