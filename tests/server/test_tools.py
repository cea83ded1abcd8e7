"""Tools and reasoning in chats, responses and messages, with the official clients."""

import json

import httpx
import openai
import pytest
from live_server import running
from pydantic import BaseModel, ConfigDict, Field
from scripted_answers import scripted
from tool_clients import ENDPOINTS, Answer, Call, Result

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


FUNCTION = {"name": "weather", "description": "Tells\n\nit", "parameters": Weather.model_json_schema()}
TOOLS = [FUNCTION, {"name": "clock"}]
OSLO = Call("weather", {"city": "Oslo", "days": 2})
TOOL = {"type": "function", "function": FUNCTION}
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


@pytest.fixture(params=ENDPOINTS)
def api(request):
    return ENDPOINTS[request.param]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_with_a_tool(serving, family, api, stream):
    with scripted(serving.engine, CALLS[family], CALLS[family], "It rains.") as prompts:
        asked = api.ask(serving, tools=TOOLS, stream=stream)
        assert asked.answer == Answer("", "", [OSLO], "calls")
        first = api.ask(serving, tools=TOOLS)
        second = api.ask(serving, first, Result(first.ids[0], "rain"), tools=TOOLS, stream=stream)
    assert second.answer == Answer("It rains.", "", [], "stop")
    assert prompts[0] == prompts[1]
    assert json.dumps(FUNCTION["parameters"])[:40] in prompts[0]
    assert "strict" not in prompts[0]
    assert "Oslo" in prompts[2].partition("Weather in Oslo?")[2]
    if family == "world":
        assert '\n\nAssistant: <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n\n' in prompts[2]
        assert "\n\nUser: <tool_response>\nrain\n</tool_response>\n\nAssistant:" in prompts[2]
        assert prompts[2].startswith(prompts[0])
    else:
        assert f"<|tool|>rain(weather, {first.ids[0]})" in prompts[2]


@pytest.mark.parametrize("text", ["{}", "So:\n{}\n", "{} and", "No call", '{"name": "weather", "param', "<tool_call>{{"])
def test_a_stream_equals_the_whole(serving, family, api, text):
    script = text.replace("{}", CALLS[family]) if "{}" in text else text
    with scripted(serving.engine, script, script):
        whole = api.ask(serving, tools=TOOLS).answer
        assert api.ask(serving, tools=TOOLS, stream=True).answer == whole
    called = text.startswith("{}") or ("{}" in text and family != "llama")
    assert (len(whole.calls), whole.reason) == ((1, "calls") if called else (0, "stop"))
    if not called:
        assert whole.content == (script.lstrip() if family == "world" else script)


def test_cut_arguments_have_the_reason_length(serving, family, api):
    size = len(CALLS[family].partition('"Os')[0]) + 3
    with scripted(serving.engine, CALLS[family], CALLS[family]):
        whole = api.ask(serving, tools=TOOLS, max_tokens=size).answer
        assert api.ask(serving, tools=TOOLS, max_tokens=size, stream=True).answer == whole
    assert whole == Answer("", "", [Call("weather", api.cut('{"city": "Os'))], "length")


ENDINGS = ("the end of text", "the end of the turn", "max_tokens", "a stop text", "a stop token")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("before", ["", "a ", "call"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_call_that_is_cut_is_not_a_reason(serving, family, api, ending, before, stream):
    """Whatever ends the answer inside of the arguments, the last call is not reported as one to run."""
    cut = CALLS[family].partition('"Oslo')[0] + '"Os'
    _ends_inside(serving, family, api, ending, before, stream, cut, [Call("weather", api.cut('{"city": "Os'))])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_call_whose_arguments_are_whole_is_a_reason(serving, family, api, ending, stream):
    """A model need not write what closes a call."""
    whole = CALLS[family].partition("2}")[0] + "2}"
    _ends_inside(serving, family, api, ending, "", stream, whole, [OSLO], "calls")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", [one for one in ENDINGS if one != "the end of the turn"])
def test_a_call_that_is_cut_after_reasoning_is_not_a_reason(thinking, api, ending, stream):
    cut, calls = HERMES_CALL.partition('"Oslo')[0] + '"Os', [Call("weather", api.cut('{"city": "Os'))]
    _ends_inside(thinking, "hermes", api, ending, "<think>; Hm.\t</think>", stream, cut, calls)


def _ends_inside(live, family, api, ending, before, stream, text, calls, reason="stop"):
    """Ask for an answer that ends with ``text``, in some way. Where an answer is, a stop text that is there before is not meant."""
    given, reasoning = {}, "; Hm." if before.startswith("<think>") else ""
    if family == "llama" and before:
        pytest.skip("calls are at the begin of an answer")
    if before == "call":
        before, calls = f"{CALLS[family]}\n", [OSLO, *calls]
    script, ends = before + text, ending == "the end of text"
    if ending == "max_tokens":
        given, reason, script = {"max_tokens": len(script)}, "length", script + "lo and more"
    elif ending == "a stop text":
        if api.stops is None:
            pytest.skip("requests have no stop texts")
        given, reached = api.stops(";")
        reason, script = reached if reached != "stop" else reason, script + "; and more"
    elif ending == "a stop token":
        if not api.stop_tokens:
            pytest.skip("requests have no stop tokens")
        given, script = {"extra_body": {"stop_token_ids": [ord("\x07")]}}, script + "\x07 and more"
    elif ending == "the end of the turn":
        if not TEMPLATES[family].stops:
            pytest.skip("the template has no stop texts")
        script += f"{TEMPLATES[family].stops[0]} and more"
    with scripted(live.engine, script, ends=ends):
        found = api.ask(live, tools=TOOLS, stream=stream, **given).answer
    assert found == Answer(before.strip() if before == "a " else "", reasoning, calls, reason)
    live.settles()


def check_call(call):
    if call.name == "weather":
        assert Weather.model_validate(call.arguments, strict=True)
    else:
        assert call == ("clock", {})


@pytest.mark.parametrize("choice", ["required", "weather", "clock"])
def test_required_calls_follow_the_schema(serving, api, choice):
    """The model is random: without a grammar there would be no call. Of what ends a call, a stop text may end the answer."""
    given = {"tools": TOOLS, "choice": choice, "parallel": False}
    whole = api.ask(serving, **given, temperature=0).answer
    assert api.ask(serving, **given, temperature=0, stream=True).answer == whole
    for found in whole, api.ask(serving, **given).answer:
        assert (found.content, found.reason, len(found.calls)) == ("", "calls", 1)
        check_call(found.calls[0])
        assert choice in ("required", found.calls[0].name)


def test_several_calls(hermes, api):
    text = f"{HERMES_CALL}\n{HERMES_CALL}"
    with scripted(hermes.engine, text, text, text):
        for more in {}, {"choice": "required"}, {"stream": True}:
            assert api.ask(hermes, tools=TOOLS, **more).answer == Answer("", "", [OSLO, OSLO], "calls")
    with scripted(hermes.engine, f"a{text}", ends=False):
        assert api.ask(hermes, tools=TOOLS, parallel=False).answer == Answer("a", "", [OSLO], "calls")
    hermes.settles()


END = HERMES_CALL.replace("Oslo", "</tool_call>")
ONE = {
    "in a string": (END, Answer("", "", [Call("weather", {"city": "</tool_call>", "days": 2})], "calls")),
    "in reasoning": (f"<think>a </tool_call> b</think>\n\n{HERMES_CALL}", Answer("", "a </tool_call> b", [OSLO], "calls")),
    "in text": ("a </tool_call> b", Answer("a </tool_call> b", "", [], "stop")),
    "after it": (f"a {HERMES_CALL}{HERMES_CALL}", Answer("a", "", [OSLO], "calls")),
}
"""Where the end of a call stands."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("place", ONE)
def test_an_answer_that_may_have_one_call_ends_with_it(thinking, api, place, stream):
    text, answer = ONE[place]
    with scripted(thinking.engine, text, ends=place == "in text"):
        assert api.ask(thinking, tools=TOOLS, parallel=False, stream=stream).answer == answer
    thinking.settles()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_one_call_is_the_end_in_every_family(serving, family, api, stream):
    with scripted(serving.engine, CALLS[family], ends=False):
        asked = api.ask(serving, tools=TOOLS, parallel=False, stream=stream)
    assert asked.answer == Answer("", "", [OSLO], "calls")
    serving.settles()


def test_several_results(hermes, api):
    text = f"{HERMES_CALL}\n{HERMES_CALL}"
    with scripted(hermes.engine, text, "So") as prompts:
        first = api.ask(hermes, tools=TOOLS)
        api.ask(hermes, first, *(Result(name, f"rain {at}") for at, name in enumerate(first.ids)), tools=TOOLS)
    results = "".join(f"<|tool|>rain {at}(weather, {name})" for at, name in enumerate(first.ids))
    assert f"<|assistant|><tool_call>weather Oslo</tool_call><tool_call>weather Oslo</tool_call>{results}<|assistant|>" in prompts[1]


def test_calls_of_strict_functions_follow_their_schema_and_other_text_is_free(hermes, api):
    strict = {**FUNCTION, "strict": True}
    with scripted(hermes.engine, "Well: <tool_call>", ends=False):
        found = api.ask(hermes, tools=[strict], parallel=False).answer
    assert found.content.startswith("Well:")
    check_call(found.calls[0])
    with scripted(hermes.engine, "Just text"):
        assert api.ask(hermes, tools=[strict]).answer == Answer("Just text", "", [], "stop")


def test_without_a_choice_the_model_sees_no_tools(serving, family, api):
    with scripted(serving.engine, CALLS[family], CALLS[family]) as prompts:
        for more in {"choice": "none", "tools": TOOLS}, {"tools": []}:
            assert api.ask(serving, **more).answer == Answer(CALLS[family], "", [], "stop")
    assert prompts[0] == prompts[1]
    assert "weather" not in prompts[0]


FIELDS = {"chat": "response_format", "responses": "text.format", "messages": "output_config.format"}


def test_a_format_beside_tools(serving, family, api):
    given = {"tools": TOOLS, "schema": Weather.model_json_schema()}
    if family == "llama":
        name = next(FIELDS[name] for name in ENDPOINTS if ENDPOINTS[name] is api)
        with pytest.raises(api.refused, match=f"cannot be told from a call of this model: {name} must be absent"):
            api.ask(serving, **given)
        return
    with scripted(serving.engine, '{"city":"Rome","days":1}', CALLS[family]):
        assert json.loads(api.ask(serving, **given).answer.content)["city"] == "Rome"
        assert api.ask(serving, **given).answer.calls == [OSLO]


def test_reasoning(thinking, api):
    switched = {"thinking": True} if api.thinks else {}
    text = "Hm.\nOh\n</think>\n\nYes" if api.thinks else "<think>Hm.\nOh\n</think>\n\nYes"
    with scripted(thinking.engine, *[text] * 2, *[f"<think>a</think>{HERMES_CALL}"] * 2, "So") as prompts:
        for stream in False, True:
            assert api.ask(thinking, stream=stream, **switched).answer == Answer("Yes", "Hm.\nOh", [], "stop")
        whole = api.ask(thinking, tools=TOOLS)
        assert api.ask(thinking, tools=TOOLS, stream=True).answer == whole.answer == Answer("", "a", [OSLO], "calls")
        assert api.ask(thinking, whole, Result(whole.ids[0], "rain"), tools=TOOLS).answer.reasoning == ""
    assert prompts[0].endswith("<|assistant|><think>\n") == api.thinks
    assert f"<|assistant|><think>a</think><tool_call>weather Oslo</tool_call><|tool|>rain(weather, {whole.ids[0]})" in prompts[4]


def test_required_calls_and_formats_come_after_reasoning(thinking, api):
    switched, begin = ({"thinking": True}, "") if api.thinks else ({}, "<think>")
    with scripted(thinking.engine, f"{begin}Hm.</think>\n", ends=False):
        found = api.ask(thinking, tools=TOOLS, choice="required", parallel=False, **switched).answer
    assert (found.content, found.reasoning, len(found.calls)) == ("", "Hm.", 1)
    with scripted(thinking.engine, begin + 'Hm.</think>{"city":', ends=False):
        found = api.ask(thinking, schema=Weather.model_json_schema(), **switched).answer
    assert found.reasoning == "Hm."
    assert Weather.model_validate_json(found.content)


# of chats


def create(live, messages=ASK, **more):
    return live.client.chat.completions.create(**{"model": "tiny", "messages": messages, "tools": [TOOL, CLOCK], "max_tokens": 300, **more})


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
    with serving.refuses(message):
        create(serving, **given)


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
