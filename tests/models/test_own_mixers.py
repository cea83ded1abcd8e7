"""Mixers of users and of other packages: registered, they are saved and loaded as those of this package."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from own_mixer import WindowMean, WindowMeanConfig

from penstock import InvalidArgument, RangeError
from penstock.engine import Engine, SamplingParams
from penstock.layers import CONFIGS, GLAConfig, Mamba2Config, MixerConfig, SoftmaxAttentionConfig, register
from penstock.models import CausalLM, Config, gla, load, mamba2, save

pytestmark = pytest.mark.sampled(file=True)

IDS = torch.tensor([[3, 1, 4, 1, 5]])
PLUGIN = """
from dataclasses import dataclass
from own_mixer import WindowMean, WindowMeanConfig as Base
from penstock.layers import MixerConfig

@dataclass(frozen=True)
class Config(MixerConfig):
    kind = "from_a_package"
    size: int = 2

    def build(self, hidden_size, layer=0, num_layers=1):
        return WindowMean(self, hidden_size)

not_a_mixer = 3
"""


@pytest.fixture
def kinds() -> Iterator[dict[str, type[MixerConfig]]]:
    before = dict(CONFIGS)
    yield CONFIGS
    CONFIGS.clear()
    CONFIGS.update(before)


@dataclass(frozen=True)
class OwnConfig(WindowMeanConfig):
    kind = "own"


def model_with(mixer: MixerConfig) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(Config(13, 16, 1, mixer)).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_a_registered_mixer_in_transformers_and_in_the_engine(tmp_path: Path) -> None:
    model = model_of("own_mixer")
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from penstock.models.huggingface import PenstockForCausalLM

    PenstockForCausalLM.of(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.model.layers[0].mixer, WindowMean)
    wanted = model.generate(IDS, 6, temperature=0)
    assert torch.equal(again.generate(IDS, max_new_tokens=6, do_sample=False)[:, 5:], wanted)
    assert torch.equal(load(tmp_path)(IDS).logits, model(IDS).logits)
    params = SamplingParams(max_tokens=6, temperature=0, keep_state=True)
    (done,) = Engine(load(tmp_path)).generate([IDS[0].tolist()], params)
    assert done.tokens == wanted[0].tolist()


def test_what_is_not_registered_is_not_saved(kinds: dict, tmp_path: Path) -> None:
    model = model_with(OwnConfig(3))
    message = r"save: model must be one of registered mixers, .* got OwnConfig of kind 'own'\. Call penstock\.layers\.register\(OwnConfig\)"
    with pytest.raises(RangeError, match=message):
        save(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    with pytest.raises(RangeError, match=r"kind must be one of .*, got 'own'\. Register a mixer of your own"):
        Config.from_dict(model.config.to_dict())
    assert register(OwnConfig) is register(OwnConfig) is CONFIGS["own"]
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(IDS).logits, model(IDS).logits)
    del kinds["own"]
    with pytest.raises(InvalidArgument, match=r"^load: .*got 'own'\. Register a mixer of your own: penstock\.layers\.register"):
        load(tmp_path / "model")


def test_a_class_that_is_defined_again_replaces_the_earlier_one(kinds: dict, tmp_path: Path) -> None:
    """As by a cell of a notebook. Models of the earlier class are saved."""

    def define(default: int) -> type[MixerConfig]:
        @register
        @dataclass(frozen=True)
        class AgainConfig(WindowMeanConfig):
            kind = "again"
            size: int = default

        return AgainConfig

    first, second = define(2), define(3)
    assert CONFIGS["again"] is second
    save(model_with(first()), tmp_path)
    assert load(tmp_path).config.mixer == second(2)


def test_kinds_are_unique(kinds: dict) -> None:
    @dataclass(frozen=True)
    class Clash(WindowMeanConfig):
        kind = "gla"

    with pytest.raises(
        RangeError, match=r"register: kind must be one that no other mixer has, got 'gla', that of penstock\.layers\.gla\.GLAC"
    ):
        register(Clash)
    assert CONFIGS["gla"] is GLAConfig
    for base in (GLAConfig, WindowMeanConfig, Mamba2Config):
        with pytest.raises(RangeError, match=rf"Inherited: kind must be its own, got '{base.kind}' of the class that it is made from"):
            type("Inherited", (base,), {})


def test_what_cannot_be_registered(kinds: dict) -> None:
    @dataclass(frozen=True)
    class WithoutBuild(MixerConfig):
        kind = "without_build"

    @dataclass(frozen=True)
    class WithoutKind(MixerConfig):
        def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> WindowMean:
            raise NotImplementedError

    class Plain(WithoutKind):
        kind = "plain"

    Unprintable = type("Unprintable", (WithoutKind,), {"kind": "a\nb"})
    for config, message in (
        (3, "config must be a subclass of MixerConfig, got 3 of type int"),
        (WindowMean, "config must be a subclass of MixerConfig, got"),
        (WithoutBuild, "config must be a class with build, got .*WithoutBuild. Let it return a new mixer"),
        (WithoutKind, "kind must be a printable text, got ''. Set it in .*WithoutKind"),
        (Plain, r"config must be a frozen dataclass, got .*Plain\. Put @dataclass\(frozen=True\)"),
        (Unprintable, "kind must be a printable text, got 'a.+b'"),
    ):
        with pytest.raises(InvalidArgument, match=f"register: {message}"):
            register(config)  # type: ignore[type-var]
    assert set(kinds) == set(CONFIGS)


def test_subclasses_have_no_place_in_the_formats_of_other_projects(kinds: dict, tmp_path: Path) -> None:
    """They may compute something else."""

    @register
    @dataclass(frozen=True)
    class OtherMamba2(Mamba2Config):
        kind = "other_mamba2"

    @register
    @dataclass(frozen=True)
    class OtherAttention(SoftmaxAttentionConfig):
        kind = "other_attention"

    for config, mixer, format in (
        (mamba2(vocab_size=13, hidden_size=16, num_layers=2, head_dim=8), OtherMamba2(4, 8), "hf"),
        (gla(vocab_size=13, hidden_size=16, num_layers=2), (GLAConfig(), OtherAttention(2)), "fla"),
    ):
        model = CausalLM(Config(**{**config.__dict__, "mixer": mixer}))
        with pytest.raises(RangeError, match=rf"format must be one of penstock for this model, got '{format}'"):
            save(model, tmp_path / "other", format)
        save(model, tmp_path / format)
        assert load(tmp_path / format).config == model.config
    assert Engine(model, max_length=8).generate([1, 2], SamplingParams(max_tokens=2))[0].tokens  # its layer is that of its base


def install(folder: Path, entry: str) -> None:
    """A package with an entry point, as pip leaves it."""
    (folder / "own_package.py").write_text(PLUGIN)
    about = folder / "own_package-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[penstock.mixers]\nfrom_a_package = {entry}\n")


def test_mixers_of_installed_packages_are_found(kinds: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "own_package:Config")
    values = {"vocab_size": 13, "hidden_size": 16, "num_layers": 1, "mixer": {"kind": "from_a_package", "size": 3}}
    assert "own_package" not in sys.modules
    config = Config.from_dict(values)
    assert config.mixer == CONFIGS["from_a_package"](3)
    del kinds["from_a_package"]
    save(CausalLM(config), tmp_path / "model")
    assert CONFIGS["from_a_package"] is type(config.mixer), "save finds it as load does"
    assert load(tmp_path / "model").config == config
    for entry, message in (
        ("own_package:Nothing", r"penstock\.mixers 'from_a_package' must be an entry point that can be imported, got own_package:Nothing"),
        ("not_there:Config", r"can be imported, got not_there:Config \(ModuleNotFoundError: No module named 'not_there'\)"),
        (
            "own_mixer:WindowMeanConfig",
            "must be the entry point of a class of this kind, got own_mixer:WindowMeanConfig of kind 'mean_of_inputs'",
        ),
        ("own_package:not_a_mixer", "register: config must be a subclass of MixerConfig, got 3"),
    ):
        kinds.pop("from_a_package", None)
        install(tmp_path, entry)
        with pytest.raises(InvalidArgument, match=message):
            Config.from_dict(values)
    sys.modules.pop("own_package", None)


def test_files_name_kinds_only(tmp_path: Path) -> None:
    """A file cannot have a module imported."""
    save(model_of("own_mixer"), tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model"]["mixer"][0] == {"kind": "mean_of_inputs", "size": 3}
    stored["model"]["mixer"][0]["kind"] = "own_mixer:WindowMeanConfig"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(InvalidArgument, match=re.escape("got 'own_mixer:WindowMeanConfig'. Register a mixer of your own")):
        load(tmp_path)
