"""Tools and reasoning in chats, with OpenAI's own client."""

import json

import httpx
import openai
import pytest
from live_server import running
from pydantic import BaseModel, ConfigDict, Field
from scripted_answers import scripted

from penstock.server.templates import JinjaTemplate, WorldTemplate

pytest.importorskip("llguidance")

THINKING = """{%- if tools %}<|system|>Tools <tool_call>:{% for one in tools %}{{ one | tojson }}{% endfor %}
{% endif %}{% for one in messages %}<|{{ one.role }}|>
{%- if one.reasoning_content is defined %}<think>{{ one.reasoning_content }}</think>{% endif %}{{ one.content or '' }}
{%- for call in one.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.city }}</tool_call>{% endfor %}
{%- if one.role == 'tool' %}({{ one.name }}, {{ one.tool_call_id }}){% endif %}
{% endfor %}<|assistant|>{% if enable_thinking %}<think>
{% endif %}"""
HERMES = THINKING.replace("<think>", "").replace("</think>", "")
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
PLAIN = "{% for one in messages %}{{ one.content }}{% endfor %}"


class Weather(BaseModel):
    """The weather."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells\n\nit", "parameters": Weather.model_json_schema()}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = [{"role": "user", "content": "Weather in Oslo?"}]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}'
CALLS = {"hermes": HERMES_CALL, "llama": LLAMA_CALL, "world": HERMES_CALL}
TEMPLATES = {"hermes": JinjaTemplate(HERMES), "llama": JinjaTemplate(LLAMA), "world": WorldTemplate()}


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def serving(model, family):
    with running(model, template=TEMPLATES[family]) as live:
        yield live


@pytest.fixture(scope="module")
def thinking(model):
    with running(model, template=JinjaTemplate(THINKING)) as live:
        yield live


@pytest.fixture(scope="module")
def hermes(model):
    with running(model, template=TEMPLATES["hermes"]) as live:
        yield live


def create(live, messages=ASK, **more):
    return live.client.chat.completions.create(**{"model": "tiny", "messages": messages, "tools": [TOOL, CLOCK], "max_tokens": 300, **more})


def streamed(stream):
    """What the pieces of a stream make: content, reasoning, calls and the reason of the end."""
    content, reasoning, calls, reason = "", "", [], None
    for piece in stream:
        for choice in piece.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                    calls.append([call.function.name, ""])
                assert call.index == len(calls) - 1
                calls[-1][1] += call.function.arguments
            reason = choice.finish_reason or reason
    return content, reasoning, [tuple(call) for call in calls], reason


def parts(choice):
    """The same of a whole answer."""
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason


def test_a_conversation_with_a_tool(serving, family):
    with scripted(serving.engine, CALLS[family], "It rains.") as prompts:
        first = create(serving).choices[0]
        call = first.message.tool_calls[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo", "days": 2})
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        second = create(serving, [*ASK, first.message, result]).choices[0]
    assert (second.message.content, second.finish_reason, second.message.tool_calls) == ("It rains.", "stop", None)
    assert json.dumps(TOOL["function"]["parameters"])[:40] in prompts[0]
    assert "strict" not in prompts[0]
    assert "Oslo" in prompts[1].partition("Weather in Oslo?")[2]
    assert "rain" in prompts[1]
    if family == "world":
        assert '\n\nAssistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n\n' in prompts[1]
        assert "\n\nUser: <tool_response>\nrain\n</tool_response>\n\nAssistant:" in prompts[1]
        assert prompts[1].startswith(prompts[0])
    else:
        assert f"<|tool|>rain(weather, {call.id})" in prompts[1]


@pytest.mark.parametrize("text", ["{}", "So:\n{}\n", "No call", '{"name": "weather", "param', "<tool_call>{{"])
def test_a_stream_equals_the_whole(serving, family, text):
    script = text.replace("{}", CALLS[family]) if "{}" in text else text
    with scripted(serving.engine, script, script):
        whole = parts(create(serving).choices[0])
        assert streamed(create(serving, stream=True)) == whole
    called = text == "{}" or ("{}" in text and family != "llama")
    assert (len(whole[2]), whole[3]) == ((1, "tool_calls") if called else (0, "stop"))
    if not called:
        assert whole[0] == (script.lstrip() if family == "world" else script)


def test_cut_arguments_have_the_reason_length(serving, family):
    size = len(CALLS[family].partition('"Os')[0]) + 3
    with scripted(serving.engine, CALLS[family], CALLS[family]):
        whole = parts(create(serving, max_tokens=size).choices[0])
        assert streamed(create(serving, max_tokens=size, stream=True)) == whole
    assert whole == ("", "", [("weather", '{"city": "Os')], "length")


def check_arguments(name, text):
    if name == "weather":
        assert Weather.model_validate_json(text, strict=True)
    else:
        assert (name, text) == ("clock", "{}")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("choice", ["required", "weather", "clock"])
def test_required_calls_follow_the_schema(serving, choice, stream):
    """The model is random: without a grammar there would be no call."""
    wanted = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    given = {"tool_choice": wanted, "seed": 3, "parallel_tool_calls": False, "max_tokens": 300}
    if stream:
        found = streamed(create(serving, **given, stream=True))
        assert found == parts(create(serving, **given).choices[0])
    for found in map(parts, create(serving, **given, n=4).choices):
        assert (found[0], found[3], len(found[2])) == ("", "tool_calls", 1)
        check_arguments(*found[2][0])
        assert choice in ("required", found[2][0][0])


def test_several_calls(hermes):
    text = f"{HERMES_CALL}\n{HERMES_CALL}"
    with scripted(hermes.engine, text, text, text):
        for more in {}, {"tool_choice": "required"}:
            whole = parts(create(hermes, **more).choices[0])
            assert (len(whole[2]), whole[3]) == (2, "tool_calls")
        assert streamed(create(hermes, stream=True)) == whole
    with scripted(hermes.engine, f"a{text}", ends=False):
        assert len(parts(create(hermes, parallel_tool_calls=False).choices[0])[2]) == 1
    hermes.settles()


def test_calls_of_strict_functions_follow_their_schema_and_other_text_is_free(hermes):
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    with scripted(hermes.engine, "Well: <tool_call>", ends=False):
        found = parts(create(hermes, tools=[strict], parallel_tool_calls=False, max_tokens=300).choices[0])
    assert found[0].startswith("Well:")
    check_arguments(*found[2][0])
    with scripted(hermes.engine, "Just text"):
        assert parts(create(hermes, tools=[strict]).choices[0]) == ("Just text", "", [], "stop")


def test_without_a_choice_the_model_sees_no_tools(serving, family):
    with scripted(serving.engine, CALLS[family], CALLS[family]) as prompts:
        for more in {"tool_choice": "none"}, {"tools": []}:
            assert parts(create(serving, **more).choices[0]) == (CALLS[family], "", [], "stop")
    assert prompts[0] == prompts[1]
    assert "weather" not in prompts[0]


def test_a_format_beside_tools(serving, family):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": Weather.model_json_schema(), "strict": True}}
    if family == "llama":
        with pytest.raises(openai.BadRequestError, match="cannot be told from a call"):
            create(serving, response_format=form)
        return
    with scripted(serving.engine, '{"city":"Rome","days":1}', CALLS[family]):
        assert json.loads(parts(create(serving, response_format=form).choices[0])[0])["city"] == "Rome"
        assert parts(create(serving, response_format=form).choices[0])[2][0][0] == "weather"


def test_helpers_of_openais_client(hermes):
    tool = openai.pydantic_function_tool(Weather, name="weather")
    given = {"model": "tiny", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
    found = hermes.client.chat.completions.parse(messages=ASK, **given).choices[0].message
    assert isinstance(found.tool_calls[0].function.parsed_arguments, Weather)
    with hermes.client.chat.completions.stream(messages=ASK, **given, seed=1) as stream:
        names = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= names
    assert isinstance(final.tool_calls[0].function.parsed_arguments, Weather)
    for message in found, found.model_dump(), final, final.model_dump():
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in found.tool_calls + final.tool_calls]
        answer = create(hermes, [*ASK, found, final, message, *results], max_tokens=2)
        assert answer.usage.completion_tokens


def test_reasoning(thinking):
    given = {"tools": [], "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    with scripted(thinking.engine, *["Hm.\nOh\n</think>\n\nYes"] * 2, *[f"<think>a</think>{HERMES_CALL}"] * 2) as prompts:
        whole = parts(create(thinking, **given).choices[0])
        assert streamed(create(thinking, **given, stream=True)) == whole == ("Yes", "Hm.\nOh", [], "stop")
        whole = parts(create(thinking).choices[0])
        assert streamed(create(thinking, stream=True)) == whole
        assert (whole[:2], len(whole[2]), whole[3]) == (("", "a"), 1, "tool_calls")
    assert prompts[0].endswith("<|assistant|><think>\n")
    with scripted(thinking.engine, "So") as prompts:
        message = create(thinking, [*ASK, {"role": "assistant", "content": "b", "reasoning_content": "Aha"}, *ASK]).choices[0].message
    assert "<|assistant|><think>Aha</think>b<|user|>" in prompts[0]
    assert not hasattr(message, "reasoning_content")


def test_required_calls_and_formats_come_behind_reasoning(thinking):
    more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    with scripted(thinking.engine, "Hm.</think>\n", ends=False):
        found = parts(create(thinking, tool_choice="required", parallel_tool_calls=False, max_tokens=300, **more).choices[0])
    assert (found[:2], len(found[2])) == (("", "Hm."), 1)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": Weather.model_json_schema(), "strict": True}}
    with scripted(thinking.engine, 'Hm.</think>{"city":', ends=False):
        found = parts(create(thinking, tools=[], response_format=form, max_tokens=300, **more).choices[0])
    assert found[1] == "Hm."
    assert Weather.model_validate_json(found[0])


ANSWER = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}
WRONG = {
    "twice": ({"tools": [TOOL, TOOL]}, "the names of tools must differ, got 'weather' twice"),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name must match pattern"),
    "type": ({"tools": [{"type": "retrieval"}]}, "tools.0.type must be 'function'"),
    "field": ({"tools": [{"type": "function", "function": {"name": "a", "magic": 1}}]}, "magic must be absent"),
    "parameters": (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
        "must have the type 'object'",
    ),
    "choice": ({"tool_choice": "always"}, "tool_choice must be 'auto', 'none', 'required' or"),
    "absent": ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice must name one of the tools, got 'b'"),
    "no tools": ({"tools": [], "tool_choice": "required"}, "tool_choice must be 'auto' or 'none' without tools"),
    "schema": (
        {"tools": [CLOCK, {"type": "function", "function": {"name": "a", "parameters": {"properties": {"b": {"type": "objekt"}}}}}],
         "tool_choice": "required"},
        "tools.1.function.parameters must be a JSON schema that llguidance knows",
    ),
    "number": (
        {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"properties": {"b": {"const": 2**60}}}}}]},
        "llguidance would round it",
    ),
    "many": (
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]},
        "the number of tools must be at most 128",
    ),
    "size": (
        {"tools": [{"type": "function", "function": {"name": "a", "description": "a" * 300_000}}]},
        "the bytes of the tools must be at most 262144",
    ),
    "calls": (
        {"messages": [*ASK, {**ANSWER, "tool_calls": ANSWER["tool_calls"] * 1025}]},
        "the number of calls of tools must be at most 1024",
    ),
    "result": ({"messages": [*ASK, {"role": "tool", "content": "a", "tool_call_id": "b"}]}, "tool_call_id must be of a call in an earlier"),
    "no id": ({"messages": [*ASK, ANSWER, {"role": "tool", "content": "a"}]}, "tool_call_id must be given with role tool"),
    "role": ({"messages": [{"role": "user", "content": "a", "tool_calls": ANSWER["tool_calls"]}]}, "with role assistant only"),
    "variables": ({"extra_body": {"chat_template_kwargs": {"magic": 1}}}, "chat_template_kwargs must be"),
    "reserved": ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tools_are_refused(serving, name):
    given, message = WRONG[name]
    with pytest.raises(openai.BadRequestError) as caught:
        create(serving, **given)
    assert message in caught.value.body["message"]
    assert len(caught.value.body["message"]) < 400
    serving.settles()


def test_templates_without_tools_refuse_them(model):
    with running(model, template=JinjaTemplate(PLAIN)) as live:
        with pytest.raises(openai.BadRequestError, match="does not know how the model writes calls"):
            create(live)
        assert create(live, tools=[], max_tokens=2)
    forced = JinjaTemplate(PLAIN)
    forced.calls = TEMPLATES["hermes"].calls
    with running(model, template=forced) as live, pytest.raises(openai.BadRequestError, match="tools must be absent, because the model's"):
        create(live)


def test_arguments_that_are_no_object_are_shown_as_text(hermes):
    wrong = {**ANSWER, "tool_calls": [{"id": "a", "function": {"name": "weather", "arguments": "[" * 5000}}]}
    assert create(hermes, [*ASK, wrong, {"role": "tool", "tool_call_id": "a", "content": "?"}], max_tokens=2)


def test_a_grammar_beyond_the_limits_fails_its_request_alone(hermes):
    deep = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"properties": {"b": {"$ref": "#"}}}}}
    answer = httpx.post(
        f"{hermes.url}/v1/chat/completions",
        json={"model": "tiny", "messages": ASK, "tools": [deep], "tool_choice": "required", "max_tokens": 5},
    )
    assert answer.status_code in (200, 400), answer.text
    assert create(hermes, max_tokens=2)


def test_logprobs_are_of_all_tokens(hermes):
    with scripted(hermes.engine, *[f"a{HERMES_CALL}"] * 2):
        whole = create(hermes, logprobs=True).choices[0]
        pieces = [piece.choices[0].logprobs for piece in create(hermes, logprobs=True, stream=True)]
    found = [one.token for piece in pieces if piece is not None for one in piece.content]
    assert found == [one.token for one in whole.logprobs.content]
    assert len(found) == len(HERMES_CALL) + 2
