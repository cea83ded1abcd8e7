"""Answers that must follow a JSON schema, from a model of random weights."""

import json
import re
from functools import partial

import openai
import pytest
import torch
from architectures import randomised
from tokenizer_files import MARKERS, TOKENIZERS, add_markers, tokenizer_of, written

from penstock.engine import Engine, SamplingParams
from penstock.models import CausalLM, gla
from penstock.models.tokenizer_json import HuggingFace
from penstock.models.tokenizers import ends_of
from penstock.server.grammars import Grammars

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Bob"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 8},
    },
    "required": ["name", "ages", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "Who?"}]


def check(text):
    found = json.loads(text)
    assert list(found) == ["name", "ages", "note"]
    assert found["name"] in ("Ada", "Bob")
    assert len(found["ages"]) <= 3
    assert all(1 <= age <= 99 for age in found["ages"])
    assert found["note"] is None or len(found["note"]) <= 8


@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"presence_penalty": 1, "logit_bias": {"65": 9}}, {"top_p": 0.5}], ids=str)
def test_answers_follow_the_schema(client, more):
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=FORMAT, max_tokens=200, n=5, seed=2, **more
    )  # fmt: skip
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)


def test_a_stream_equals_the_whole(client):
    given = {"model": "tiny", "messages": MESSAGES, "response_format": FORMAT, "max_tokens": 200, "seed": 5}
    whole = client.chat.completions.create(**given).choices[0].message.content
    pieces = client.chat.completions.create(**given, stream=True)
    assert "".join(choice.delta.content or "" for piece in pieces for choice in piece.choices) == whole
    check(whole)


def test_completions_take_a_schema_too(client):
    found = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=200, extra_body={"response_format": FORMAT})
    for choice in found.choices:
        check(choice.text)


def test_json_object_begins_with_a_brace(client):
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=20)
    assert found.choices[0].message.content[0] == "{"
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, response_format={"type": "text"}, max_tokens=2)


def test_the_constraint_does_not_change_other_requests(client, expected):
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=300, stream=True
    )
    next(iter(stream))
    found = client.completions.create(model="tiny", prompt="abc", max_tokens=30, seed=1)
    assert found.choices[0].text == expected("abc", max_tokens=30, seed=1).text
    stream.close()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}},
            "must be a JSON schema that llguidance knows",
        ),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "http://a/b"}}}, "must be a JSON schema that"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["a" * 70_000]}}},
            "the bytes of the schema must be at most 65536",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": [{"type": "integer", "minimum": 2**53 + 1}]}}},
            "integers of a schema must be from -2^53 to 2^53, and other numbers from -2^63 to 2^63, got 9007199254740993",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "minimum": 1e19}}},
            "other numbers from -2^63 to 2^63, got 1e+19",
        ),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}, "within the limits of llguidance"),
        ({"type": "json_schema"}, "json_schema must be given with type json_schema"),
        ({"type": "xml"}, "response_format.type must be 'text', 'json_object' or 'json_schema'"),
    ],
    ids=["type", "reference", "size", "integer", "number", "recursion", "absent", "kind"],
)
def test_wrong_formats_are_refused(client, form, message):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)
    assert message in caught.value.body["message"]
    assert len(caught.value.body["message"]) < 300
    assert caught.value.param.startswith("response_format")


@pytest.mark.parametrize("with_end", [False, True])
def test_a_tokenizer_json_gives_masks_of_its_tokens(tmp_path, with_end):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|end|>"] if with_end else []
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special)
    made.train_from_iterator(['{"name": "Ada"} {"name": "Bob"}'] * 9, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    if with_end:
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    tokenizer = HuggingFace(tmp_path / "tokenizer.json")
    constraint = Grammars(tokenizer, tokenizer.vocab_size).compile(SCHEMA, "test")()
    text = '{"name":"Ada","ages":[1],"note":null}'
    opening = [token for token in range(tokenizer.vocab_size) if constraint.mask[token // 8] >> token % 8 & 1]
    assert {tokenizer.decode([token])[0] for token in opening} == {"{"}
    ended = False
    for token in tokenizer.encode(text):
        assert not ended
        assert constraint.mask[token // 8] >> token % 8 & 1
        ended = constraint.accept(token)
    assert ended


def with_prefix_space(file):
    content = json.loads(file.read_text("utf-8"))
    content["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(content), "utf-8")


def with_decoders(file):
    """One decoder as a sequence, those of Llama as Metaspace."""
    content = json.loads(file.read_text("utf-8"))
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    several = [content["decoder"]] if content["decoder"]["type"] == "ByteLevel" else [{"type": "ByteFallback"}, metaspace]
    content["decoder"] = {"type": "Sequence", "decoders": several}
    file.write_text(json.dumps(content), "utf-8")


def with_ends(file):
    """Several ends of answers, which the file has as text."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_file(str(file))
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("<|im_end|>", "<|eot|>")])
    made.save(str(file))
    ends = [made.token_to_id(text) for text in ("<|im_end|>", "<|eot|>", "<end>")]
    file.with_name("generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


CHANGED = {
    "markers": ("bytes", partial(add_markers, special=False)), "special markers": ("bytes", partial(add_markers, special=True)),
    "prefix space": ("bytes", with_prefix_space), "sequence": ("bytes", with_decoders),
    "markers of bytes": ("fallback", partial(add_markers, special=False)), "decoder of metaspace": ("fallback", with_decoders),
    "special markers of bytes": ("fallback", partial(add_markers, special=True)),
    "ends": ("bytes", with_ends), "ends of bytes": ("fallback", with_ends),
}  # fmt: skip
"""Other kinds of tokenizer.json."""


def changed(name, folder, texts):
    """A tokenizer of ``TOKENIZERS`` or ``CHANGED``."""
    if name in TOKENIZERS:
        return tokenizer_of(name, folder, texts)
    kind, change = CHANGED[name]
    file = written(folder, texts)[kind]
    change(file)
    return HuggingFace(file).with_texts(MARKERS)


@pytest.mark.parametrize("name", [name for name in CHANGED if "markers" in name])
def test_markers_may_be_tokens(name, tmp_path):
    tokenizer = changed(name, tmp_path, ["the cat"])
    lark = f"start: {json.dumps(MARKERS[0])} /a+/ {json.dumps(MARKERS[1])}"
    constraint = Grammars(tokenizer, tokenizer.vocab_size).compile_lark(lark, "test", "tools")()
    (begin,), (end,) = (tokenizer.encode(text)[-1:] for text in MARKERS[:2])
    assert tokenizer.pieces[begin] == MARKERS[0].encode()
    for token in (begin, tokenizer.encode("ba")[-1], end):
        assert constraint.mask[token // 8] >> token % 8 & 1
        ended = constraint.accept(token)
    assert ended


@pytest.mark.parametrize("name", [*TOKENIZERS, *CHANGED])
def test_no_token_that_ends_an_answer_is_a_part_of_it(name, tmp_path):
    tokenizer = changed(name, tmp_path, ["the cat"])
    ends = ends_of(tokenizer)
    assert len(ends) == (3 if "ends" in name else 1)
    constraint = Grammars(tokenizer, tokenizer.vocab_size).compile({"type": "string"}, "test")()
    quote = next(token for token in range(tokenizer.vocab_size) if constraint.mask[token // 8] >> token % 8 & 1)
    assert not constraint.accept(quote)
    assert not any(constraint.mask[token // 8] >> token % 8 & 1 for token in ends)


@pytest.mark.parametrize("name", [*TOKENIZERS, *CHANGED])
def test_every_token_that_ends_an_answer_may_end_what_follows_a_grammar(name, tmp_path):
    """Models for chats end a message by another token than a text, as Llama 3, whose files name that of texts first."""
    tokenizer = changed(name, tmp_path, ["the cat"])
    made = Grammars(tokenizer, tokenizer.vocab_size).compile_lark("start: /b?a*/", "test", "tools")
    for end in ends_of(tokenizer):
        constraint = made()
        assert not constraint.accept(tokenizer.encode("ba")[-1])
        assert constraint.mask[end // 8] >> end % 8 & 1
        assert constraint.accept(end)


@pytest.fixture(scope="module", params=[*TOKENIZERS, *CHANGED])
def answers(request, tmp_path_factory):
    """Answers of a random model that follow a schema."""
    tokenizer = changed(request.param, tmp_path_factory.mktemp("tokenizers"), ['{"name": "Ada"}'] * 9)
    torch.manual_seed(0)
    model = CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)).eval()
    randomised(model)
    engine, grammars = Engine(model, tokenizer, slots=16, token_budget=256), Grammars(tokenizer, tokenizer.vocab_size)

    def generate(schema):
        params = SamplingParams(max_tokens=150, n=8, seed=3, constraint=grammars.compile(schema, "test"))
        return engine.generate([[1]], params)[0].completions

    return generate


STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)', re.DOTALL)


@pytest.mark.parametrize(
    "schema",
    [SCHEMA, {"type": "object"}, {"type": "array", "items": SCHEMA, "minItems": 1, "maxItems": 1}],
    ids=["object", "any object", "list"],
)
def test_answers_have_no_white_space_between_values(answers, schema):
    found = answers(schema)
    assert not any(re.search(r"\s", STRING.sub("", one.text)) for one in found)
    if schema != {"type": "object"}:
        assert {one.finish_reason for one in found} == {"stop"}
        for one in found:
            check(one.text if schema is SCHEMA else one.text[1:-1])


@pytest.mark.parametrize("options", [{"whitespace_flexible": True}, {"whitespace_pattern": "[ ]{1,2}"}], ids=str)
def test_a_schema_may_ask_for_white_space(answers, options):
    found = answers({**SCHEMA, "x-guidance": options})
    assert any(re.search(r"\s", STRING.sub("", one.text)) for one in found)
    for one in found:
        if one.finish_reason == "stop":
            check(one.text)
