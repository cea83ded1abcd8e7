"""Sizes, options and types that transformers' classes load with: what they keep, and what they refuse."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import model_of

from penstock import DtypeError, RangeError, ShapeError
from penstock.models import save

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402
from wrapped_models import SMALL, drawn, wrapped  # noqa: E402

from penstock.models.huggingface import CACHE, PUBLIC_TYPES, PenstockForCausalLM, PenstockModel  # noqa: E402

pytestmark = [pytest.mark.usefixtures("at_full_speed"), pytest.mark.sampled(file=True)]


@pytest.mark.parametrize("name", ["rwkv7", "rwkv7a", "mamba2"])
def test_numbers_of_tokens(name: str) -> None:
    """A model takes another number of tokens, or refuses it and is as before."""
    model, ids = wrapped(name), drawn(2, 7)
    before, rule = {name: x.clone() for name, x in model.state_dict().items()}, "vocab_size must be 13, the tokens of the channel mixes"
    assert model.resize_token_embeddings(13) is model.resize_token_embeddings(11, pad_to_multiple_of=13) is model.get_input_embeddings()
    for tokens, multiple, count in ((15, None, 15), (None, 8, 16), (13, 8, 16)):
        options = {"new_num_tokens": tokens, "pad_to_multiple_of": multiple}
        if name == "rwkv7a":
            with pytest.raises(RangeError, match=rf"resize_token_embeddings: {rule}, got {count}\."):
                model.resize_token_embeddings(**options)
        else:
            model.resize_token_embeddings(**options)
            assert model(torch.full((1, 1), count - 1)).logits.shape == (1, 1, count)
            model.resize_token_embeddings(13)
        assert model.get_input_embeddings().num_embeddings == model.model.sizes.vocab_size == model.config.vocab_size == 13
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    if name == "rwkv7a":
        with pytest.raises(RangeError, match=rf"set_input_embeddings: {rule}, got 15\."):
            model.set_input_embeddings(torch.nn.Embedding(15, 24))
    for value, kind, message in (
        (None, DtypeError, "set_input_embeddings: value must be an nn.Embedding, got None"),
        (torch.nn.Linear(13, 24), DtypeError, "set_input_embeddings: value must be an nn.Embedding, got Linear"),
        (torch.nn.Embedding(13, 25), ShapeError, "set_input_embeddings: value must be of 24 channels, the hidden_size, got 25"),
    ):
        with pytest.raises(kind, match=message):
            model.set_input_embeddings(value)
    for argument in ("new_num_tokens", "pad_to_multiple_of"):
        with pytest.raises(RangeError, match=f"resize_token_embeddings: {argument} must be a whole number of at least 1, got 0"):
            model.resize_token_embeddings(**{argument: 0})
    model(ids)


@pytest.mark.parametrize("name", SMALL)
def test_a_base_model_loads_without_its_head(name: str, tmp_path: Path) -> None:
    save(model_of(name), tmp_path / "model")
    model, whole = AutoModel.from_pretrained(tmp_path / "model"), AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(model) is PenstockModel
    ids = drawn(2, 5)
    with torch.no_grad():
        out = model(ids)
        assert torch.equal(whole.head(out.last_hidden_state), whole(ids).logits)
        assert torch.equal(out.last_hidden_state, whole.model(ids).last_hidden_state)
        assert isinstance(out[CACHE].get_seq_length(), int)
    assert whole.base_model is whole.model
    assert whole.get_decoder() is whole.model
    assert whole.name_or_path == whole.config.name_or_path == str(tmp_path / "model")
    model.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))
    if not model.sizes.tie_embeddings:
        with pytest.raises(RangeError, match=r"head\.weight must be a tensor"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def test_options_that_change_nothing_pass(tmp_path: Path) -> None:
    save(model_of("rwkv6"), tmp_path / "here" / "model")
    path, ids = tmp_path / "here" / "model", drawn(1, 5)
    wanted = AutoModelForCausalLM.from_pretrained(path)(ids).logits
    for options in (
        {"subfolder": ""}, {"ignore_mismatched_sizes": False}, {"use_kernels": False}, {"weights_only": True},
        {"max_memory": {"cpu": "1GB"}},
        {"device_map": {"": torch.device("cpu")}}, {"offload_folder": "x"}, {"low_cpu_mem_usage": True},
        *({"attn_implementation": name} for name in ("eager", "sdpa", "flash_attention_2", "flex_attention")),
        {"tie_word_embeddings": False}, {"key_mapping": None}, {"quantization_config": None}, {"state_dict": None}, {"variant": None},
        {"trust_remote_code": True}, {"revision": "main", "token": None, "local_files_only": True},
    ):  # fmt: skip
        assert torch.equal(AutoModelForCausalLM.from_pretrained(path, **options)(ids).logits, wanted), options
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "here", subfolder="model")(ids).logits, wanted)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    made = AutoModelForCausalLM.from_config(loaded.config, attn_implementation="sdpa")
    for one in (loaded, made):
        one.set_attn_implementation("flash_attention_2")
    assert torch.equal(loaded(ids).logits, wanted)
    for options, message in (
        ({"ignore_mismatched_sizes": True}, "ignore_mismatched_sizes must be False, got True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, as in the checkpoint, got True"),
        ({"max_memory": {"cpu": "1KB"}}, "max_memory must be at least [0-9]+ bytes on cpu, got 1000"),
        ({"max_memory": {0: "1GB"}}, "max_memory must be given for cpu, where the model is, got"),
        ({"quantization_config": {}}, "arguments must be of this model, got quantization_config"),
        ({"subfolder": "elsewhere"}, "subfolder must be a folder in .*, got 'elsewhere'"),
        ({"key_mapping": {}, "state_dict": {}}, "got key_mapping"),
    ):
        with pytest.raises(RangeError, match=message):
            PenstockForCausalLM.from_pretrained(path, **options)


def test_models_and_configurations_of_other_types_are_refused() -> None:
    wrapped = PenstockForCausalLM.of(model_of("rwkv6"))
    for kind in (PenstockForCausalLM, PenstockModel):
        assert torch.equal(kind.of(wrapped.causal_lm()).get_input_embeddings().weight, wrapped.model.embeddings.weight)
        for other in (wrapped, wrapped.model, wrapped.causal_lm().config, wrapped.causal_lm().layers[0], "path", None):
            message = rf"^{kind.__name__}.of: model must be a CausalLM, got one of type {type(other).__name__}\."
            with pytest.raises(DtypeError, match=message):
                kind.of(other)
    for name in PUBLIC_TYPES:
        config = AutoConfig.for_model(name)
        assert type(pickle.loads(pickle.dumps(config))) is type(config)
        for auto in (AutoModel, AutoModelForCausalLM):
            with pytest.raises(DtypeError, match=r"config must be a PenstockConfig, got one of .* use from_pretrained"):
                auto.from_config(config)


def test_auto_classes_ignore_no_size(tmp_path: Path) -> None:
    save(model_of("rwkv6"), tmp_path / "model")
    for options, message in (
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, as in the checkpoint, got True"),
        ({"hidden_size": 32, "vocab_size": 99}, r"hidden_size must be 24, as in the checkpoint, got 32(.|\n)*|vocab_size must be 13"),
        ({"num_hidden_layers": 1}, "num_hidden_layers must be 2, as in the checkpoint, got 1"),
    ):
        for kind in (AutoModelForCausalLM, transformers.AutoModel):
            with pytest.raises(RangeError, match=message):
                kind.from_pretrained(tmp_path / "model", **options)


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, PenstockForCausalLM])
def test_tied_embeddings_come_apart(kind: Any, tmp_path: Path) -> None:
    """By ``tie_word_embeddings=False``, and where an adapter was merged into the head of a tied model, in every file."""
    ids = drawn(2, 5)
    save(model_of("mamba2"), tmp_path / "tied")
    apart = kind.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)
    assert torch.equal(apart(ids).logits, kind.from_pretrained(tmp_path / "tied")(ids).logits)
    embeddings = apart.model.embeddings.weight.clone()
    with torch.no_grad():
        apart.head.weight.mul_(2)
    apart.tie_weights()
    assert torch.equal(apart.model.embeddings.weight, embeddings)
    merged = kind.from_pretrained(tmp_path / "tied")
    merged.head.weight = torch.nn.Parameter(apart.head.weight.detach().clone())
    for n, model in enumerate((apart, merged)):
        model.save_pretrained(tmp_path / f"transformers {n}")
        again = kind.from_pretrained(tmp_path / f"transformers {n}")
        assert torch.equal(again(ids).logits, apart(ids).logits)
        assert not again.config.tie_word_embeddings


def test_options_of_configurations_are_kept(tmp_path: Path) -> None:
    model = wrapped("gla", torch.float32)
    model.config.pad_token_id, model.config.output_hidden_states, model.config.fuse_loss = 3, True, True
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.config.pad_token_id, again.config.output_hidden_states, again.config.fuse_loss) == (3, True, True)
    for load in (AutoModelForCausalLM.from_pretrained, PenstockForCausalLM.from_pretrained):
        other = load(tmp_path, pad_token_id=0, use_cache=False, output_hidden_states=False)
        assert (other.config.pad_token_id, other.config.use_cache, other.config.output_hidden_states) == (0, False, False)
        assert other(drawn(1, 3)).get(CACHE) is None
    config = transformers.AutoConfig.from_pretrained(tmp_path, eos_token_id=5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, config=config).config.eos_token_id == 5
