"""Anthropic's ``/v1/messages`` with its own client."""

import json
import threading
from contextlib import closing
from typing import get_type_hints

import anthropic
import httpx
import pytest
from anthropic import types
from anthropic.types import message_count_tokens_params, message_create_params
from live_server import KEY, running
from scripted_answers import scripted

from penstock.server import app
from penstock.server.limits import Limits
from penstock.server.messages_blocks import TextBlock, ThinkingBlock, ToolResult, ToolUse
from penstock.server.messages_protocol import Choice, CountBody, MessagesBody, Thinking, Tool

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    {"role": "user", "content": [{"type": "text", "text": "Bye", "cache_control": {"type": "ephemeral"}}]},
]
PROMPT = "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant:"
GIVEN = {"model": "tiny", "messages": TURNS, "system": "Be brief.", "max_tokens": 30}
GREEDY = {"temperature": 0}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def client_of(url, **options):
    return anthropic.Anthropic(base_url=url, max_retries=0, timeout=60, **{"api_key": KEY, **options})


@pytest.fixture
def claude(live):
    with closing(client_of(live.url)) as client:
        yield client
    live.settles()


def send(client, stream=False, extra=GREEDY, **given):
    return client.messages.create(**{**GIVEN, **given}, stream=stream, extra_body=extra)


def streamed(client, **given):
    """The message of a stream, and the types of its events."""
    events = list(send(client, stream=True, **given))
    message = events[0].message
    text = "".join(one.delta.text for one in events if one.type == "content_block_delta")
    (last,) = (one for one in events if one.type == "message_delta")
    return message, text, last, [one.type for one in events]


def test_an_answer_is_the_completion_of_the_rendered_messages(claude, expected):
    wanted = expected(PROMPT, max_tokens=30, temperature=0, stop=("\n\nUser:",))
    found = send(claude)
    assert [(one.type, one.text) for one in found.content] == [("text", wanted.text.lstrip())]
    assert (found.type, found.role, found.model, found.stop_sequence) == ("message", "assistant", "tiny", None)
    assert found.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[wanted.completions[0].finish_reason]
    assert found.id.startswith("msg_")
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == len(PROMPT)
    assert found.usage.output_tokens == len(wanted.tokens)
    blocks = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    apart = [TURNS[0], {"role": "assistant", "content": "Hel"}, {"role": "assistant", "content": "lo"}, TURNS[2]]
    assert send(claude, system=blocks, messages=apart).content == found.content


def test_a_stream_equals_the_whole(claude):
    whole = send(claude)
    message, text, last, types = streamed(claude)
    assert text == whole.content[0].text
    assert types[:2] == ["message_start", "content_block_start"]  # the client drops the ping
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (message.role, message.content, message.stop_reason) == ("assistant", [], None)
    assert (last.delta.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    with claude.messages.stream(**GIVEN, extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (text, whole.stop_reason)


def test_events_of_a_stream_as_they_are_written(live):
    answer = httpx.post(f"{live.url}/v1/messages", json={**GIVEN, **GREEDY, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    for event in events:
        name, data = event.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert events[1] == 'event: ping\ndata: {"type":"ping"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["stop", "length", "schema"])
def test_why_an_answer_ends(claude, name, stream):
    free = send(claude).content[0].text
    given, extra = {"stop": ({"stop_sequences": ["\0no", free[9:11]]}, {}), "length": ({"max_tokens": 3}, {})}.get(
        name, ({}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}})
    )  # fmt: skip
    if stream:
        _, text, last, _ = streamed(claude, **given, extra={**GREEDY, **extra})
        found = last.delta
    else:
        found = send(claude, **given, extra={**GREEDY, **extra})
        text = found.content[0].text
    if name == "schema":
        assert json.loads(text)["a"] in (1, 2)
    reason = {"stop": "stop_sequence", "length": "max_tokens", "schema": "end_turn"}[name]
    assert (found.stop_reason, found.stop_sequence) == (reason, free[9:11] if name == "stop" else None)
    assert name == "schema" or text == free[: free.index(free[9:11]) if name == "stop" else len(text)]


def test_parameters_reach_the_engine(claude, expected):
    for extra in ({"temperature": 0.5}, {"top_k": 1}, {"top_p": 1e-9}):
        wanted = expected(PROMPT, max_tokens=30, temperature=0, stop=("\n\nUser:",)).text.lstrip()
        assert (send(claude, extra=extra).content[0].text == wanted) == ("temperature" not in extra)


def test_tokens_are_counted_and_those_of_the_cache_told(claude):
    long = [{"role": "user", "content": "x" * 300}]
    given = {"model": "tiny", "messages": long, "system": "Be brief."}
    count = claude.messages.count_tokens(**given).input_tokens
    usage = [send(claude, messages=long, max_tokens=1).usage for _ in range(2)]
    assert [one.input_tokens + one.cache_read_input_tokens for one in usage] == [count, count]
    assert usage[1].cache_read_input_tokens == count // 64 * 64


def test_tokens_of_tools_are_counted(claude, live):
    count = claude.messages.count_tokens
    plain = {"model": "tiny", "messages": TURNS, "system": "Be brief."}
    assert count(**plain).input_tokens == count(**plain, tools=[TOOL], tool_choice={"type": "none"}).input_tokens == len(PROMPT)
    messages = [*TURNS, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    given = {**plain, "messages": messages, "tools": [TOOL], "tool_choice": {"type": "any"}}
    with scripted(live.engine, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>') as prompts:
        usage = claude.messages.create(**given, max_tokens=100).usage
    assert count(**given).input_tokens == len(prompts[0]) == usage.input_tokens + usage.cache_read_input_tokens


def test_blocks_as_the_model_sees_them(claude, live):
    """Results come before the text of the user, errors are named, and neighbours of one role are one message."""
    text = [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]
    calls = [{**USE, "caller": {"type": "direct"}}, {**USE, "id": "b", "input": {"x": [1]}}]
    messages = [
        TURNS[0],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [{**RESULT, "content": text}]},
        {"role": "user", "content": [{**RESULT, "tool_use_id": "b", "is_error": True, "content": "down"}, {"type": "text", "text": "So?"}]},
    ]
    with scripted(live.engine, "Yes") as prompts:
        send(claude, messages=messages)
    called = [f'<tool_call>\n{{"name": "f", "arguments": {given}}}\n</tool_call>' for given in ("{}", '{"x": [1]}')]
    results = [f"User: <tool_response>\n{text}\n</tool_response>\n\n" for text in ("rain", "Error: down")]
    answer = "\n".join(["Assistant: Look.", *called])
    assert prompts[0] == f"System: Be brief.\n\nUser: Hi\n\n{answer}\n\n{''.join(results)}User: So?\n\nAssistant:"


def test_arguments_that_are_not_json(claude, live):
    wrong = '<tool_call>\n{"name": "f", "arguments": {"a": b}}\n</tool_call>'
    with scripted(live.engine, wrong, wrong):
        (found,) = send(claude, max_tokens=200, tools=[TOOL]).content
        events = list(send(claude, max_tokens=200, tools=[TOOL], stream=True))
    assert found.input == {"INVALID_JSON": '{"a": b}'}
    assert "".join(one.delta.partial_json for one in events if one.type == "content_block_delta") == '{"a": b}'


def test_a_stop_sequence_after_a_call_is_the_reason(claude, live):
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>STOP'
    with scripted(live.engine, text, ends=False):
        found = send(claude, max_tokens=200, tools=[TOOL], stop_sequences=["STOP"])
    assert ([one.type for one in found.content], found.stop_reason, found.stop_sequence) == (["tool_use"], "stop_sequence", "STOP")


PASS = [
    {"metadata": {"user_id": "me"}}, {"service_tier": "auto"}, {"service_tier": "standard_only"},
    {"tools": []}, {"tool_choice": {"type": "auto"}}, {"tool_choice": {"type": "none"}},
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive", "display": "summarized"}},
    {"cache_control": {"type": "ephemeral"}}, {"stop_sequences": []}, {"speed": "standard"},
    {"container": None, "output_config": None},
]  # fmt: skip


@pytest.mark.parametrize("given", PASS, ids=str)
def test_what_cannot_change_an_answer_passes(claude, given):
    assert send(claude, extra={**GREEDY, **given}).content == send(claude).content


def tool(**more):
    return {"tools": [{**TOOL, **more}]}


def turns(role, *blocks):
    return {"messages": [TURNS[0], {"role": "assistant", "content": [USE]}, {"role": role, "content": list(blocks)}, TURNS[2]]}


REFUSED = {
    "tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type must be 'custom'"),
    "twice": ({"tools": [TOOL, TOOL]}, "the names of tools must differ, got 'f' twice"),
    "schema": (tool(input_schema={"type": "array"}), "the parameters of a tool must have the type 'object'"),
    "no schema": ({"tools": [{"name": "f"}]}, "tools.0.input_schema must be given, got none"),
    "wrong schema": (
        {**tool(input_schema={"properties": {"b": {"type": "objekt"}}}), "tool_choice": {"type": "any"}},
        "tools.0.input_schema must be a JSON schema that llguidance knows",
    ),
    "name": (tool(name="a b"), "tools.0.name must match pattern"),
    "examples": (tool(input_examples=[{}]), "tools.0.input_examples must be empty, got [{}]. Put examples into the description."),
    "deferred": (tool(defer_loading=True), "tools.0.defer_loading must be false, got True."),
    "callers": (tool(allowed_callers=["code_execution_20250825"]), "tools.0.allowed_callers must be ['direct']"),
    "buffered": (tool(eager_input_streaming=False), "tools.0.eager_input_streaming must be true, got False."),
    "choice": ({"tool_choice": {"type": "any"}}, "tool_choice must be 'auto' or 'none' without tools"),
    "choice type": ({"tool_choice": {"type": "some"}}, "tool_choice.type must be 'auto', 'any', 'tool' or 'none', got 'some'"),
    "choice name": ({**tool(), "tool_choice": {"type": "tool"}}, "tool_choice must have a name with type tool, and with no other"),
    "other name": ({**tool(), "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice must name one of the tools, got 'g'"),
    "thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 20}},
        "thinking must be of type disabled or adaptive, because this server does not know how the model writes what it thinks",
    ),
    "thinking type": ({"thinking": {"type": "between_tools"}}, "thinking.type must be 'enabled', 'disabled' or 'adaptive'"),
    "display": ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display must be 'summarized', got 'omitted'."),
    "budget": ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens must be absent with type disabled, got 9"),
    "no answer": (
        {"thinking": {"type": "enabled", "budget_tokens": 30}},
        "thinking.budget_tokens must be less than max_tokens = 30, got 30",
    ),
    "redacted": (
        turns("assistant", {"type": "redacted_thinking", "data": "a"}),
        "messages.2.content.0 must be a block of type text, tool_use, tool_result or thinking, got {",
    ),
    "block": ({"messages": [{"role": "user", "content": [7]}]}, "messages.0.content.0 must be a block of type text, tool_use"),
    "content": ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content must be a text or a list of blocks, got 7"),
    "field": (turns("user", {**RESULT, "magic": 1}), "messages.2.content.0.tool_result.magic must be absent, got 1"),
    "image": (turns("user", {**RESULT, "content": [IMAGE]}), "tool_result.content must be a text or a list of blocks of type text"),
    "user image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0 must be a block of type text, tool_use"),
    "role": (turns("user", USE), "a block of type tool_use must be in a message of the assistant, got one of the user"),
    "result role": (turns("assistant", RESULT), "a block of type tool_result must be in a message of the user, got one of the assistant"),
    "thought role": (turns("user", {"type": "thinking", "thinking": ""}), "a block of type thinking must be in a message of the assistant"),
    "result": (turns("user", {**RESULT, "tool_use_id": "b"}), "tool_use_id must be of a call in an earlier message, got 'b'"),
    "order": (
        turns("user", {"type": "text", "text": "So"}, RESULT),
        "blocks of type tool_result must come before those of type text in messages of the user, got one after a text",
    ),
    "parts": (
        turns("user", {**RESULT, "content": [{"type": "text", "text": ""}] * 1024}),
        "the number of parts of messages must be at most 1024, got 1027",
    ),
    "effort": ({"output_config": {"effort": "low"}}, "output_config.effort must be absent, got 'low'. Ask in a message"),
    "prefill": ({"messages": TURNS[:2]}, "messages must end with one of the user, got one of the assistant"),
    "empty": ({"messages": []}, "messages must have at least 1 item"),
    "temperature": ({"temperature": 1.5}, "temperature must be less than or equal to 1, got 1.5"),
    "length": ({"max_tokens": 5000}, "max_tokens must be at most 4096, got 5000"),
    "stops": ({"stop_sequences": ["a"] * 17}, "the number of stop texts must be at most 16, got 17"),
    "stop": ({"stop_sequences": ["a" * 257]}, "the length of a stop text must be at most 256, got 257"),
    "system": ({"system": [{"type": "text", "text": ""}] * 1025}, "the number of parts of messages must be at most 1024, got 1028"),
    "unknown": ({"temprature": 1}, "temprature must be absent, got 1"),
    "thread": ({"thread": {"type": "create"}}, "thread must be absent, got {'type': 'create'}. Send all messages; with the client's"),
    "container": ({"container": "a"}, "container must be absent, got 'a'. This server runs no code."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_it_is_refused_by_name(claude, name):
    extra, message = REFUSED[name]
    with pytest.raises(anthropic.BadRequestError) as caught:
        send(claude, extra=extra)
    error = caught.value.body["error"]
    assert (caught.value.body["type"], error["type"]) == ("error", "invalid_request_error")
    assert error["message"].startswith("messages: ")
    assert message in error["message"]


def test_all_fields_of_anthropics_client_are_decided():
    headers = {"workspace_id"}
    for params, body in (
        (types.ToolParam, Tool),
        (types.TextBlockParam, TextBlock),
        (types.ToolResultBlockParam, ToolResult),
        (types.ToolUseBlockParam, ToolUse),
        (types.ThinkingBlockParam, ThinkingBlock),
        (types.ThinkingConfigEnabledParam, Thinking),
        (types.ToolChoiceToolParam, Choice),
        (message_create_params.MessageCreateParamsNonStreaming, MessagesBody),
        (message_count_tokens_params.MessageCountTokensParams, CountBody),
    ):
        assert set(get_type_hints(params)) - set(body.model_fields) - headers == set()


def test_keys_as_bearer_token_or_header(model):
    with running(model, api_key=KEY) as live:
        for options in ({"api_key": KEY}, {"api_key": None, "auth_token": KEY}):
            with closing(client_of(live.url, **options)) as client:
                assert send(client).content
                assert [one.id for one in client.models.list().data] == ["tiny"]
        for options in ({"api_key": "other"}, {"api_key": None, "auth_token": "other"}, {"api_key": f"Bearer {KEY}"}):
            with closing(client_of(live.url, **options)) as client, pytest.raises(anthropic.AuthenticationError) as caught:
                send(client)
            assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["", "/count_tokens", "/none"])
def test_errors_have_anthropics_form(live, monkeypatch, path):
    kinds = {}

    def post(**given):
        answer = httpx.post(f"{live.url}/v1/messages{path}", **given)
        assert answer.json()["type"] == "error"
        kinds[answer.status_code] = answer.json()["error"]["type"]

    body = {name: value for name, value in GIVEN.items() if name != "max_tokens" or not path}
    if path == "/none":
        post(json=body)
        assert kinds == {404: "not_found_error"}
        return
    post(json={**body, "model": "huge"})
    post(content=b"{")
    post(content=b"a" * (live.service.limits.body_bytes + 1))
    post(content=b"{}", headers={"content-type": "application/json"})
    monkeypatch.setattr(app, "messages" if not path else "count_tokens", None)
    post(json=body)
    assert kinds == {
        404: "not_found_error", 415: "invalid_request_error", 413: "request_too_large", 400: "invalid_request_error", 500: "api_error",
    }  # fmt: skip


def test_a_model_without_a_template_has_no_messages(model):
    with running(model, template=None) as live, closing(client_of(live.url)) as client:
        with pytest.raises(anthropic.BadRequestError, match="the model must have a chat template"):
            send(client)
        with pytest.raises(anthropic.BadRequestError, match="the model must have a chat template"):
            client.messages.count_tokens(model="tiny", messages=TURNS)


def test_an_error_in_a_stream_is_an_event(model):
    with running(model, Limits(seconds=0.3)) as live, closing(client_of(live.url)) as client, scripted(live.engine, "a" * 4000):
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(send(client, stream=True, max_tokens=4000))
        assert caught.value.body["error"]["type"] == "timeout_error"


def test_a_closed_stream_frees_its_slot(claude, live):
    stream = send(claude, stream=True, max_tokens=4000)
    next(iter(stream))
    stream.close()
    live.settles()
    assert threading.active_count() < 100
