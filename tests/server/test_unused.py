"""Fields of OpenAI's that cannot change an answer pass, with their types checked; the others are refused by name."""

from typing import get_type_hints

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_assistant_message_param, chat_completion_user_message_param
from openai.types.chat import completion_create_params as chat_params

from penstock.server.protocol import ChatBody, CompletionBody, Message
from penstock.server.templates import JinjaTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]
BOTH = {"model": "tiny", "max_tokens": 8, "temperature": 0}
ENDPOINTS = {
    "completions": (lambda client: client.completions, {**BOTH, "prompt": "Hi"}, lambda choice: choice.text),
    "chat": (lambda client: client.chat.completions, {**BOTH, "messages": MESSAGES}, lambda choice: choice.message.content),
}
PASS = {
    "both": [
        {"user": "me"}, {"safety_identifier": "me"}, {"metadata": {"run": "7"}}, {"prompt_cache_key": "a"},
        {"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"service_tier": "auto"}, {"service_tier": "default"},
        {"store": False}, {"stream_options": {"include_usage": True}}, {"stream_options": {"include_obfuscation": False}},
        {"logit_bias": None}, {"logit_bias": {}}, {"stop": None}, {"stop": []}, {"user": None, "store": None, "metadata": None},
    ],
    "completions": [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}, {"suffix": None}, {"echo": None}],
    "chat": [
        {"tools": []}, {"tools": None, "tool_choice": None}, {"tool_choice": "none"}, {"tool_choice": "auto"},
        {"parallel_tool_calls": True}, {"functions": []}, {"function_call": "none"}, {"modalities": ["text"]},
        {"prediction": {"type": "content", "content": "Hi"}},
        {"reasoning_effort": "none"}, {"verbosity": "medium"}, {"audio": None}, {"web_search_options": None}, {"moderation": None},
        {"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}, {"max_completion_tokens": 8},
    ],
}  # fmt: skip
REFUSED = {
    "both": [
        ({"user": 7}, "user must be a valid string, got 7"), ({"metadata": {"a": 1}}, "metadata must be an object of texts, got {'a': 1}"),
        ({"service_tier": "flex"}, "service_tier must be 'auto' or 'default', got 'flex'. This server has one tier."),
        ({"store": True}, "store must be false, got True. This server does not store answers."),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation must be false, got True."),
    ],
    "completions": [
        ({"best_of": 2}, "best_of must be n = 1, got 2. Ask for n of them with logprobs, and take the best."),
        ({"suffix": "end"}, "suffix must be empty, got 'end'. Tell the model in the prompt what follows."),
    ],
    "chat": [
        ({"tool_choice": "required"}, "tool_choice must be 'auto' or 'none' without tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be a valid boolean, got 1"),
        ({"functions": [{"name": "f"}]}, "functions must be empty, got"),
        ({"modalities": ["text", "audio"]}, "modalities must be ['text'], got"),
        ({"reasoning_effort": "high"}, "reasoning_effort must be 'none', got 'high'. Ask in a message"),
        ({"verbosity": "low"}, "verbosity must be 'medium', got 'low'. Ask in a message"),
        ({"web_search_options": {}}, "web_search_options must be absent, got {}. This server does not search."),
        ({"audio": {"voice": "a"}}, "audio must be absent, got {'voice': 'a'}. This server reads and writes texts only."),
        ({"moderation": {"model": "a"}}, "moderation must be absent"),
    ],
}  # fmt: skip


def listed(table):
    return [(endpoint, one) for endpoint in ENDPOINTS for one in (*table["both"], *table[endpoint])]


def call(client, endpoint, given):
    create, base, text = ENDPOINTS[endpoint]
    known = {"stream", "n", "echo", "stop"}
    extra = {name: value for name, value in given.items() if name not in known}
    answer = create(client).create(**base, **{name: value for name, value in given.items() if name in known}, extra_body=extra)
    return [text(choice) for choice in answer.choices]


@pytest.mark.parametrize(("endpoint", "given"), listed(PASS), ids=str)
def test_what_cannot_change_an_answer_passes(client, endpoint, given):
    assert call(client, endpoint, given) == call(client, endpoint, {}) * given.get("n", 1)


@pytest.mark.parametrize(("endpoint", "case"), listed(REFUSED), ids=str)
def test_what_would_change_it_is_refused_by_name(client, endpoint, case):
    given, message = case
    with pytest.raises(openai.BadRequestError) as caught:
        call(client, endpoint, given)
    assert message in caught.value.body["message"]
    assert caught.value.param.split(".")[0] in given


def test_all_fields_of_openais_client_are_decided():
    for params, body in (
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionBody),
        (chat_params.CompletionCreateParamsNonStreaming, ChatBody),
        (chat_completion_user_message_param.ChatCompletionUserMessageParam, Message),
        (chat_completion_assistant_message_param.ChatCompletionAssistantMessageParam, Message),
    ):
        assert set(get_type_hints(params)) - set(body.model_fields) == set()


REPLAYED = {
    "nulls": {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": None},
    "lists": {"annotations": [], "tool_calls": []},
    "name": {"name": "bob"},
    "cached part": {"content": [{"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
}


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_replayed_messages_pass(client, role, name):
    plain = {"role": role, "content": "Hi"}
    found = [client.chat.completions.create(**BOTH, messages=[{**plain, **one}, *MESSAGES]) for one in ({}, REPLAYED[name])]
    assert found[0].choices == found[1].choices


def test_an_answer_is_sent_back_as_it_came(client):
    answer = client.chat.completions.create(**BOTH, messages=MESSAGES).choices[0].message
    assert client.chat.completions.create(**BOTH, messages=[*MESSAGES, answer, *MESSAGES]).choices
    empty = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "assistant", "content": None, "tool_calls": []}]
    found = [client.chat.completions.create(**BOTH, messages=[*MESSAGES, one, *MESSAGES]).choices for one in empty]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"refusal": "I cannot"}, "refusal must be absent, got 'I cannot'. Put its text into content."),
        ({"annotations": [{}]}, "annotations must be empty"),
        ({"audio": {"id": "a"}}, "audio must be absent"),
    ],
    ids=str,
)
def test_what_a_message_would_lose_is_refused(client, field, message):
    with pytest.raises(openai.BadRequestError, match=r"messages\.1") as caught:
        client.chat.completions.create(**BOTH, messages=[*MESSAGES, {"role": "assistant", "content": "a", **field}])
    assert message in caught.value.body["message"]


def test_a_template_sees_names():
    template = JinjaTemplate("{% for one in messages %}{{ one.name or '-' }}: {{ one.content }};{% endfor %}")
    assert template.render([Message(role="user", content="a", name="bob"), Message(role="user", content="b")]) == "bob: a;-: b;"
