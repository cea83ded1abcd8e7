"""The YAML file of ``penstock train``: what is read, and an error for everything else."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from penstock import InvalidArgument, models
from penstock.errors import MissingExtra
from penstock.training.settings import ARCHITECTURES, Data, Mesh, Training, parse, read

SMALL = {
    "model": {"architecture": "rwkv6", "hidden_size": 32, "num_layers": 2, "head_size": 16},
    "data": {"train": ["a.txt", "b.txt"], "length": 64},
    "training": {"output": "run", "steps": 3},
}


def changed(section, **entries):
    return SMALL | {section: SMALL[section] | entries}


def test_a_file_is_read(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("""
model: {path: a.pth}
data:
  train: a.txt
  packing: true
  separator: "\\n\\n"
training: {output: run, learning_rate: 1e-3, betas: [0.9, 0.99], clip: 1, evaluate_every: 7}
""")
    settings = read(file)
    assert settings.model == {"path": "a.pth"}
    assert (settings.data.train, settings.data.packing, settings.data.separator) == (("a.txt",), True, "\n\n")
    training = settings.training
    assert (training.learning_rate, training.betas, training.clip, training.evaluate_every) == (1e-3, (0.9, 0.99), 1.0, 7)
    assert (training.steps, training.epochs, training.resume) == (None, 1.0, True)


def test_lists_and_none_are_kept():
    settings = parse(SMALL)
    assert settings.data.train == ("a.txt", "b.txt")
    assert settings.training.steps == 3
    assert parse(changed("training", steps=None)).training.steps is None


def test_every_architecture_can_be_named():
    assert {"rwkv6", "gla"} <= set(ARCHITECTURES)
    for function in ARCHITECTURES.values():
        assert {"vocab_size", "hidden_size", "num_layers"} <= set(inspect.signature(function).parameters)
        assert inspect.signature(function).return_annotation in ("Config", models.Config)


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        (None, ["train: the file must be a mapping of data, mesh, model, training, got None"]),
        ({}, ["train: model must be given", "train: data must be given", "train: training must be given"]),
        (SMALL | {"modell": {}}, ["train: the file must be made of data, mesh, model, training, got 'modell'. Did you mean model?"]),
        (changed("data", lenght=3), ["train: data must be made of evaluation, length, packing", "got 'lenght'. Did you mean length?"]),
        (changed("training", zzz=1), ["weight_decay, got 'zzz'."]),
        (changed("training", batch_size=1.5), ["train: training.batch_size must be a whole number, got 1.5 of type float"]),
        (changed("training", batch_size=True), ["training.batch_size must be a whole number, got True of type bool"]),
        (
            changed("training", gradient_checkpointing="some"),
            ["training.gradient_checkpointing must be true or false or selective, got 'some'"],
        ),
        (changed("training", resume="yes"), ["training.resume must be true or false, got 'yes'"]),
        (changed("training", learning_rate="fast"), ["training.learning_rate must be a number, got 'fast'"]),
        (changed("training", steps=0, keep=0), ["training.steps must be at least 1, got 0", "training.keep must be at least 1, got 0"]),
        (changed("training", betas=[0.9]), ["training.betas must be two numbers"]),
        (changed("training", schedule="step"), ["training.schedule must be one of cosine, linear, constant, got 'step'"]),
        (changed("training", dtype="float16"), ["training.dtype must be one of auto, float32, bfloat16"]),
        (changed("training", epochs=float("nan")), ["training.epochs must be a finite number above 0, got nan"]),
        (changed("training", seed=2**32), ["training.seed must be at most 4294967295, got 4294967296"]),
        (changed("training", batch_size=2**63), ["training.batch_size must be below 2^63, got 9223372036854775808"]),
        (changed("training", learning_rate=10**400), ["training.learning_rate must be a finite number above 0, got inf"]),
        (changed("training", output=""), ["training.output must be the path of a folder, got ''"]),
        (changed("data", train=[]), ["data.train must be at least one file"]),
        (changed("data", train=3), ["data.train must be a text, got 3 of type int"]),
        (changed("data", length=0), ["data.length must be at least 1"]),
        (SMALL | {"data": {}}, ["data.train must be given, got none. Add this key."]),
        (SMALL | {"model": {"architecture": "rwkv9"}}, ["model.architecture must be one of", "got 'rwkv9'"]),
        (SMALL | {"model": 3}, ["model.architecture must be one of"]),
        (SMALL | {"model": {"architecture": "gla", "hidden_size": 8}}, ["model.num_layers must be given"]),
        (
            changed("model", heads=2),
            ["train: model of architecture rwkv6 must be made of architecture, ", "got 'heads'. Did you mean num_heads?"],
        ),
        (SMALL | {"model": {"path": "a", "hidden_size": 3}}, ["model with a path must be made of path, got 'hidden_size'"]),
        (SMALL | {"model": {"path": 3}}, ["model.path must be a text, got 3"]),
    ],
)
def test_wrong_files_are_refused_with_every_reason(content, messages):
    with pytest.raises(InvalidArgument) as error:
        parse(content)
    for message in messages:
        assert message in str(error.value)


def test_a_file_that_is_not_yaml_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [")
    for name, kind in (("a.yaml", "YAML file"), ("nowhere.yaml", "text file in UTF-8")):
        with pytest.raises(InvalidArgument, match=f"train: config must be a {kind}, got"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: 2024-13-45}", "must be a YAML file, got .*month must be in"),
        ("data: {length: !!int abc}", "must be a YAML file, got .*invalid literal"),
        ("[" * 50_000, "must be a YAML file, got .*recursion"),
        ("data: {length: 16, length: 8}", "must be a YAML file with every key once, got 'length' again in line 1"),
        ("data: {}\ndata: {}", "must be a YAML file with every key once, got 'data' again in line 2"),
    ],
)
def test_values_that_yaml_cannot_read_and_keys_given_twice(text, message, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        read(tmp_path / "a.yaml")


def test_without_yaml_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingExtra, match=r"train: pyyaml must be installed, got none\. Run pip install -e '\.\[transformers\]'"):
        read(tmp_path / "a.yaml")


def test_the_documentation_has_every_key():
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "training.md").read_text()
    for section in (Data, Training):
        for field in fields(section):
            assert f"`{field.name}`" in text
    assert all(f"`{field.name}`" in (docs / "scaling.md").read_text() for field in fields(Mesh))
    assert all(f"`{name}`" in text for name in ARCHITECTURES)
    settings = read(docs / "small.yaml")
    assert settings.training.output == "runs/small"
