"""What the text of an answer consists of, whatever the pieces in which it comes."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.server.answers import Answer, AnswerForm, AnswerReader, read_answer
from penstock.server.families import CALLS, REASONING, recognised_calls, recognised_reasoning

HERMES = AnswerForm(calls=CALLS["hermes"], names=frozenset({"f", "get_weather"}))
LLAMA = AnswerForm(calls=CALLS["llama"], names=frozenset({"f", "get_weather"}))
THINK = AnswerForm(reasoning=REASONING["think"])
FORMS = {
    "plain": AnswerForm(),
    "strips": AnswerForm(strips=True),
    "hermes": HERMES,
    "one": AnswerForm(calls=CALLS["hermes"], names=HERMES.names, parallel=False, strips=True),
    "llama": LLAMA,
    "think": THINK,
    "thinking": AnswerForm(reasoning=REASONING["think"], thinking=True, calls=CALLS["hermes"], names=HERMES.names),
    "think llama": AnswerForm(reasoning=REASONING["think"], calls=CALLS["llama"], names=HERMES.names),
}
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>",
    '{"name": "f", "arguments": ', '{"name":"g","arguments":', "{", "}", "1", ",",
    '{"name": "f", "parameters": {', '{"arguments": {"a": [1, "}"]}, "name": "f"}', '"', "\\", "a", " ", "\n", "\u00a0", "[", "]", "é",
    ": ",
    '{"a": "</tool_call>"}', '{"name": "f"}', "{}", "<", "<tool", ', "id": 1',
]  # fmt: skip


def pieces(form, parts):
    reader, answer = AnswerReader(form), Answer()
    for part in parts:
        for piece in reader.push(part):
            assert piece.text or piece.kind == "call"
            answer.add(piece)
    for piece in reader.finish():
        answer.add(piece)
    answer.cut = reader.cut
    return answer


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), st.data())
def test_parts_do_not_depend_on_where_a_text_is_cut(name, text, data):
    whole = read_answer(FORMS[name], text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert pieces(FORMS[name], [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == whole
    assert pieces(FORMS[name], text) == whole


@pytest.mark.parametrize("name", ["plain", "hermes", "llama"])
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
@example('<tool_call>\n{"name": "g", "arguments": {}}</tool_call> <tool_call>')
def test_a_text_without_calls_is_content(name, text):
    found = read_answer(FORMS[name], text)
    assert found.content == text or found.calls
    assert {name for name, _ in found.calls} <= HERMES.names


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\""}}\n</tool_call>'
FIELDS = '<tool_call>{"name": "f", "arguments": {}, "id": {"a": "}"}} </tool_call>\n'
ARGUMENTS = '{"a": "}</tool_call>\\""}'
TEXTS = {
    "call": (HERMES, CALL, "", [("f", ARGUMENTS)]),
    "two": (HERMES, f"{CALL}\n{CALL}\n", "", [("f", ARGUMENTS)] * 2),
    "text before and after": (HERMES, f"Look:\n{CALL}\n\nDone. ", "Look:Done. ", [("f", ARGUMENTS)]),
    "other order": (HERMES, '<tool_call>{"id": 1, "arguments": {"b": [2]}, "name": "f"}</tool_call>', "", [("f", '{"b": [2]}')]),
    "no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "without end": (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    "end cut": (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
    "brace absent": (HERMES, '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    "fields after": (HERMES, FIELDS + CALL, "", [("f", "{}"), ("f", ARGUMENTS)]),
    "fields cut": (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "</tool_call', "", [("f", "{}")]),
    "fields of no JSON": (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": ;', ";", [("f", "{}")]),
    "no fields": (HERMES, '<tool_call>{"name": "f", "arguments": {}, so', ", so", [("f", "{}")]),
    "fields without markers": (LLAMA, '{"name": "f", "parameters": {}, "type": "function"}', "", [("f", "{}")]),
    "arguments cut": (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    "unknown": (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None, []),
    "header cut": (HERMES, 'So <tool_call>{"name": "f", "argu', None, []),
    "name cut": (HERMES, 'So\n<tool_call>\n{"name": "', None, []),
    "no JSON": (HERMES, "<tool_call>f(1)</tool_call>", None, []),
    "wrong JSON": (HERMES, '<tool_call>{"a": 1, "name": f}</tool_call> and', None, []),
    "list": (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    "marker cut": (HERMES, "a <tool_", None, []),
    "deep": (HERMES, '<tool_call>{"a": ' + "[" * 3000 + "]" * 3000 + "}</tool_call>", None, []),
    "one of two": (FORMS["one"], f" {CALL}\n{CALL}", CALL, [("f", ARGUMENTS)]),
    "llama": (LLAMA, ' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    "llama tag": (LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    "llama text": (LLAMA, 'It is {"name": "f", "parameters": {}}', None, []),
    "llama JSON": (LLAMA, '{"a": 1}', None, []),
    "llama tag alone": (LLAMA, " <|python_tag|>print(1)", None, []),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_calls(name):
    form, text, content, calls = TEXTS[name]
    found = read_answer(form, text)
    assert found == Answer(text if content is None else content, "", calls, cut=name == "arguments cut")
    assert pieces(form, text) == found


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes", False, "Hm.", "Yes"),
        ("Hm.\n</think>\n\nYes", True, "Hm.", "Yes"),
        ("\n<think>\nHm.\n</think>\n\nYes", True, "Hm.", "Yes"),
        ("Hm <think>.</think>Yes", True, "Hm <think>.", "Yes"),
        ("</think>Yes", True, "", "Yes"),
        ("\n<thi", True, "<thi", ""),
        ("\n<think>a </think> </think>", False, "a", "</think>"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>a b </thi", False, "a b </thi", ""),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_reasoning(text, thinking, reasoning, content):
    form = AnswerForm(reasoning=REASONING["think"], thinking=thinking)
    assert read_answer(form, text) == Answer(content, reasoning)
    assert pieces(form, text) == Answer(content, reasoning)


def test_arguments_are_given_as_they_come():
    reader = AnswerReader(HERMES)
    given = [
        [(piece.kind, piece.text) for piece in reader.push(part)]
        for part in ('<tool_call>{"name": "f", "argum', 'ents": {"a', '": 1', "}}")
    ]
    assert given == [[], [("call", "f"), ("arguments", '{"a')], [("arguments", '": 1')], [("arguments", "}")]]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ['<tool_call>{"', "<tool_call>", '<tool_call>{"name": "h", "arguments": {', "</think", " "])
def test_long_answers_take_seconds_at_most(text):
    for form in FORMS.values():
        pieces(form, ["<think>", *[text[at:] + text[:at] for at in range(7)] * 1000])


def test_families_are_recognised_by_their_templates():
    hermes = "{%- for tool in tools %}{{ tool | tojson }}{% endfor %} <tool_call>\n{'name': <function-name>} </tool_call>"
    assert recognised_calls(hermes).name == "hermes"
    assert recognised_calls("<tool_call>\n<function=example_function_name>") is None
    assert (
        recognised_calls(
            """'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'"""
        ).name
        == "llama"
    )
    assert recognised_calls("{{ messages }}") is None
    assert recognised_reasoning("{%- if '</think>' in content %}").name == "think"
    assert recognised_reasoning("{{ messages }}") is None
    assert json.loads(read_answer(HERMES, CALL).calls[0][1])
