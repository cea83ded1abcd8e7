"""Chat templates."""

import json
import pickle
import re

import pytest

from penstock.errors import RangeError
from penstock.models.tokenizers import Bytes
from penstock.server.families import REASONING
from penstock.server.protocol import Message
from penstock.server.templates import JinjaTemplate, WorldTemplate, find_template
from penstock.server.tools import Function

CHATML = """{{ bos_token }}{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
MESSAGES = [Message(role="user", content="Hi <b>"), Message(role="assistant", content="Hello"), Message(role="user", content="Bye")]


def test_jinja_writes_messages_and_special_tokens():
    text = JinjaTemplate(CHATML, {"bos_token": "<s>"}).render(MESSAGES)
    assert text == (
        "<s><|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_marks_of_training_are_passed_over():
    source = "{% for one in messages %}{% generation %}<{{ one.role }}>{{ one.content }}{% endgeneration %}{% endfor %}"
    assert JinjaTemplate(source).render(MESSAGES) == JinjaTemplate(re.sub(r"{% (end)?generation %}", "", source)).render(MESSAGES)


DEVELOPERS = {
    "": "system", "{# developer #}": "system", "{% if false %}a developer's text{% endif %}": "system",
    "{% if messages[0].role == 'developer' %}{% endif %}": "developer", '{% if "a" in ["system", "developer"] %}{% endif %}': "developer",
}  # fmt: skip
"""Parts of templates, and the role that they have for a developer."""


@pytest.mark.parametrize(("known", "role"), DEVELOPERS.items())
def test_developers_are_the_system_of_templates_that_do_not_know_them(known, role):
    source = known + "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    assert JinjaTemplate(source).render([Message(role="developer", content="a")]) == f"<{role}>a"


def test_world_writes_one_empty_line_after_each_message():
    text = WorldTemplate().render([Message(role="user", content="a\r\n\r\nb\n"), Message(role="assistant", content=" c ")])
    assert text == "User: a\nb\n\nAssistant: c\n\nAssistant:"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{% for one in range(99999999) %}a{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ 'aaaaaaaaaaaaaaaa' * 64 }}{% endfor %}{% endfor %}",
    ],
    ids=["raises", "subclasses", "base", "range", "type", "changes", "size"],
)
def test_a_template_that_fails_or_breaks_out_is_an_error_of_the_request(source):
    with pytest.raises(RangeError, match="chat: messages must be"):
        JinjaTemplate(source).render(MESSAGES)


def test_a_broken_template_is_refused_at_the_start():
    with pytest.raises(RangeError, match="serve: chat_template must be a Jinja template"):
        JinjaTemplate("{% for %}")


def test_the_template_of_a_checkpoint_is_found(tmp_path):
    assert find_template(tmp_path, Bytes()) is None
    config = {"chat_template": "{{ bos_token }}A", "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert find_template(tmp_path, Bytes()).render(MESSAGES) == "<s>A"
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_template(tmp_path / "model.safetensors", Bytes()).render(MESSAGES) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert find_template(tmp_path, Bytes()).render(MESSAGES) == "F"
    (tmp_path / "own").write_text("O")
    assert find_template(tmp_path, Bytes(), tmp_path / "own").render(MESSAGES) == "O"
    with pytest.raises(RangeError, match="chat_template must be a text file"):
        find_template(tmp_path, Bytes(), tmp_path / "none")


FUNCTION = [Function(name="f")]


@pytest.mark.parametrize("files", [False, True])
def test_named_templates_are_taken_as_transformers_takes_them(tmp_path, files):
    """ "tool_use" where functions are listed, else "default"; one of them at least must be the default."""
    sources = {"tool_use": "{% if tools %}T <tool_call>{% endif %}", "rag": "R", "default": "D"}

    def write(*names):
        if not files:
            named = [{"name": name, "template": sources[name]} for name in names]
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
            return
        more = tmp_path / "additional_chat_templates"
        more.mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "chat_template.jinja" if name == "default" else more / f"{name}.jinja").write_text(sources[name])

    write("rag", "tool_use")
    with pytest.raises(RangeError, match="one is named 'default', got rag, tool_use"):
        find_template(tmp_path, Bytes())
    assert find_template(tmp_path, Bytes(), tmp_path / ("additional_chat_templates/rag.jinja" if files else "tokenizer_config.json"))
    write("rag", "tool_use", "default")
    found = find_template(tmp_path, Bytes())
    for one in (found, pickle.loads(pickle.dumps(found))):
        assert one.render(MESSAGES) == "D"
        assert one.render(MESSAGES, FUNCTION) == "T <tool_call>"


def test_rwkv_world_has_its_own(tmp_path):
    pytest.importorskip("pyrwkv_tokenizer")
    from penstock.models.tokenizers import World

    assert find_template(tmp_path, World()) == WorldTemplate()
    for name, reasons in (("rwkv7-g1-1.5b-20250429-ctx4096.pth", True), ("RWKV7-G1c-7.2B", True), ("RWKV-x070-World-2.9B-v3.pth", False)):
        template = find_template(tmp_path / name, World())
        assert (template.reasoning is not None) == reasons
        assert find_template(tmp_path / name, World(), reasoning_parser="none").variables == ()
        assert (template.variables == ("enable_thinking",)) == reasons


def test_rwkv_world_lets_models_reason():
    """As RWKV-7 G1 was trained: the prompt ends with the marker without its last character."""
    template, messages = WorldTemplate(reasoning=REASONING["think"]), [Message(role="user", content="Hi")]
    assert template.render(messages) == template.render(messages, variables={"enable_thinking": False}) == "User: Hi\n\nAssistant:"
    assert template.render(messages, variables={"enable_thinking": True}) == "User: Hi\n\nAssistant: <think"
    with pytest.raises(RangeError, match="chat_template_kwargs must be absent, because the template has no variables"):
        WorldTemplate().render(messages, variables={"enable_thinking": True})
