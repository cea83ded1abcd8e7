"""Arguments of transformers' classes: packed rows in all their forms, embeddings, hidden states, hooks, options of from_pretrained."""

import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, SIZES, model_of
from formulas import error
from sampling import slow
from torch import Tensor
from torch.nn import functional as F

from penstock import DtypeError, RangeError, ShapeError
from penstock.models import CausalLM, save

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DataCollatorWithFlattening  # noqa: E402

from penstock.models.huggingface import CACHE, PUBLIC_TYPES, PenstockForCausalLM, PenstockModel  # noqa: E402

V = SIZES["vocab_size"]
pytestmark = [pytest.mark.usefixtures("at_full_speed"), pytest.mark.sampled(file=True)]
GROWING = [name for name, config in ARCHITECTURES.items() if any(mixer.grows for mixer in config.mixers)]
SMALL = ["rwkv6", "gla", "retnet", "linear", "mamba2", "hybrid"]


def of(name: str, dtype: torch.dtype = torch.float64) -> PenstockForCausalLM:
    return PenstockForCausalLM.of(model_of(name, dtype).eval())


def drawn(*shape: int, seed: int = 4) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


LENGTHS = [3, 1, 5, 2]
STARTS = torch.tensor([0, 3, 4, 9, 11])
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))[None]
FORMS: dict[str, dict[str, Any]] = {
    "cu_seqlens": {"cu_seqlens": STARTS},
    "cu_seq_lens": {"cu_seq_lens_q": STARTS.int(), "cu_seq_lens_k": STARTS.int(), "max_length_q": 5, "max_length_k": 5},
    "seq_idx": {"seq_idx": NUMBERS.int()},
    "position_ids": {"position_ids": POSITIONS},
    "positions from 2": {"position_ids": POSITIONS + 2},
    "all": {"cu_seq_lens_q": STARTS.int(), "cu_seq_lens_k": STARTS.int(), "seq_idx": NUMBERS, "position_ids": POSITIONS},
    "mask of ones": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 11, dtype=torch.int64)},
    "empty sequences": {"cu_seqlens": torch.tensor([0, 0, 3, 4, 4, 9, 11]), "position_ids": POSITIONS},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_sequence_of_a_packed_row_sees_another(name: str, form: str) -> None:
    model, ids = of(name), drawn(1, 11)
    with torch.no_grad():
        alone = [model(one, use_cache=False).logits for one in ids.split(LENGTHS, 1)]
        for cached in (False, True):
            assert error(model(ids, **FORMS[form], use_cache=cached).logits, torch.cat(alone, 1)) < 1e-9
        hidden = model.model(input_ids=ids, **FORMS[form], use_cache=False).last_hidden_state
        assert error(model.head(hidden), torch.cat(alone, 1)) < 1e-9
    loss = model(ids, labels=ids, **FORMS[form]).loss
    losses = [F.cross_entropy(x[0, :-1], one[0, 1:], reduction="sum") for x, one in zip(alone, ids.split(LENGTHS, 1))]
    assert error(loss, torch.stack(losses).sum() / (11 - 4)) < 1e-9


@pytest.mark.parametrize("name", SMALL)
def test_several_packed_rows_with_padding(name: str) -> None:
    """Rows of different sequences, as packed batches of several rows have them, with padding on either side."""
    model, ids = of(name), drawn(2, 6)
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 0]])
    pieces = [(0, 0, 2), (0, 2, 5), (0, 5, 6), (1, 1, 5)]
    numbers = torch.tensor([[0, 0, 1, 1, 1, 2], [7, 8, 8, 8, 8, 9]])
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
    with torch.no_grad():
        for options in (
            {"position_ids": positions},
            {"position_ids": positions, "attention_mask": keep},
            {"seq_idx": numbers, "attention_mask": keep},
            {"cu_seqlens": torch.tensor([0, 2, 5, 6, 7, 11, 12])},
            {"cu_seqlens": torch.tensor([0, 2, 5, 6, 12]), "attention_mask": keep},
        ):
            found = model(ids, **options).logits
            for row, begin, end in pieces:
                assert error(found[row, begin:end], model(ids[row : row + 1, begin:end]).logits[0]) < 1e-9
        assert error(model(ids, position_ids=positions[:1]).logits[1, 2:5], model(ids[1:, 2:5]).logits[0]) < 1e-9, "of one row for all"


@pytest.mark.parametrize("name", SMALL)
def test_the_flattening_collator(name: str) -> None:
    model = of(name)
    parts = [drawn(length, seed=length) for length in (4, 7, 2)]
    data = [{"input_ids": one.tolist(), "labels": one.tolist()} for one in parts]
    losses = torch.stack([F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="sum") for one in parts])
    for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}, {"return_position_ids": False, "return_seq_idx": True}):
        batch = DataCollatorWithFlattening(return_tensors="pt", **options)(data)
        assert error(model(**batch).loss, losses.sum() / 10) < 1e-9


def test_positions_of_padded_and_continued_rows_are_no_packing() -> None:
    """transformers makes positions from masks, and goes on counting behind a cache."""
    model, ids = of("retnet"), drawn(2, 6)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = (keep.cumsum(1) - 1).masked_fill(keep == 0, 1)
    with torch.no_grad():
        wanted = model(ids, attention_mask=keep).logits
        assert error(model(ids, attention_mask=keep, position_ids=positions).logits, wanted) < 1e-12
        whole, first = model(ids).logits, model(ids[:, :2], use_cache=True)
        rest = model(ids[:, 2:], past_key_values=first[CACHE], position_ids=torch.arange(2, 6)[None].expand(2, -1)).logits
        assert error(rest, whole[:, 2:]) < 1e-9


def test_errors_of_packing() -> None:
    model, ids = of("gla"), drawn(1, 11)
    for options, kind, message in (
        ({"position_ids": POSITIONS * 2}, RangeError, "position_ids must be that of the token before plus 1, or begin again"),
        ({"position_ids": POSITIONS[0]}, ShapeError, r"position_ids must be .* of shape \[1, 11\], got torch.int64 \[11\]"),
        ({"position_ids": POSITIONS.double()}, ShapeError, "position_ids must be an int64 or int32 tensor"),
        ({"seq_idx": NUMBERS[:, 1:]}, ShapeError, r"seq_idx must be .* of shape \[1, 11\], got torch.int64 \[1, 10\]"),
        ({"cu_seq_lens_q": STARTS[None]}, ShapeError, r"cu_seq_lens_q must be .* of shape \[N\+1\], got torch.int64 \[1, 5\]"),
        ({"cu_seq_lens_k": STARTS}, RangeError, "cu_seq_lens_k must be None without cu_seq_lens_q"),
        ({"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS[1:]}, RangeError, "cu_seq_lens_k must be offsets that begin at 0"),
        ({"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS[[0, 1, 4]]}, RangeError, "cu_seq_lens_k must be of the same sequences as"),
        ({"cu_seqlens": STARTS, "seq_idx": NUMBERS.clamp(max=2)}, RangeError, "seq_idx must be of the same sequences as cu_seqlens"),
        ({"cu_seqlens": STARTS, "position_ids": torch.arange(11)[None]}, RangeError, "position_ids must be of the same sequences as"),
        ({"cu_seqlens": STARTS[:-1]}, RangeError, "cu_seqlens must"),
        ({"cu_seqlens": STARTS + 1}, RangeError, "cu_seqlens must"),
    ):  # fmt: skip
        for call in (model, model.model):
            with pytest.raises(kind, match=message):
                call(ids, **options)
    with pytest.raises(RangeError, match="generate: position_ids must be one sequence a row, got packed ones"):
        model.generate(ids, position_ids=POSITIONS, max_new_tokens=2)


@pytest.mark.parametrize("name", [*GROWING, "rwkv6", *slow(*(name for name in ARCHITECTURES if name not in (*GROWING, "rwkv6")))])
def test_cached_tokens_are_those_without_a_cache(name: str) -> None:
    """Greedy, padded on the left, and with beams, whose rows of states are exchanged."""
    model, ids = of(name), drawn(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    for options in ({}, {"attention_mask": mask}, {"num_beams": 3}, {"num_beams": 2, "attention_mask": mask}):
        found, wanted = (model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cached, **options) for cached in (True, False))
        assert torch.equal(found, wanted)


def test_layers_that_read_tokens_take_no_embeddings_in_their_place() -> None:
    model, ids = of("rwkv7a"), drawn(2, 7)
    message = (
        r"inputs_embeds must be None for a model whose layers read tokens, such as DeepEmbed, got .*\. Pass the tokens .* as input_ids"
    )
    embeds = model.get_input_embeddings()(ids)
    for call in (model, model.model, partial(model, use_cache=False), partial(model.generate, max_new_tokens=2)):
        with pytest.raises(RangeError, match=message):
            call(inputs_embeds=embeds)
    with pytest.raises(RangeError, match=rf"generate: {message}"):
        model.generate(inputs_embeds=embeds, max_new_tokens=2)


@pytest.mark.parametrize("name", ["rwkv7", "rwkv7a", "mamba2"])
def test_numbers_of_tokens(name: str) -> None:
    """A model takes another number of tokens, or refuses it and is as before."""
    model, ids = of(name), drawn(2, 7)
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


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("rwkv7a", "rwkv7b")])
def test_embeddings_in_place_of_tokens(name: str) -> None:
    model, ids = of(name), drawn(2, 7)
    keep = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    embeds = model.get_input_embeddings()(ids)
    for options in ({}, {"attention_mask": keep}, {"use_cache": True}, {"labels": ids}):
        with torch.set_grad_enabled("labels" in options):
            found, wanted = model(inputs_embeds=embeds, **options), model(ids, **options)
        assert torch.equal(found.logits, wanted.logits)
        assert "labels" not in options or torch.equal(found.loss, wanted.loss)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": keep, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, **options)[:, 7:]
    for cached in (True, False):
        assert torch.equal(model.generate(inputs_embeds=embeds, **options, use_cache=cached), wanted)
    with pytest.raises(ShapeError, match=r"inputs_embeds must be a tensor of shape \[B,T,C\], got \[2, 7\]"):
        model(inputs_embeds=ids)
    with pytest.raises(ShapeError, match="inputs_embeds"):
        model(inputs_embeds=embeds[..., 1:])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_states(name: str) -> None:
    """The embeddings, what each layer but the last returns, and the last hidden states: as transformers has them."""
    model, ids = of(name), drawn(2, 7)
    keep = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    wanted: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, given: wanted.append(given[0]))
    model.model.norm.register_forward_hook(lambda module, given, output: wanted.append(output))
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
    seen = list(wanted)
    for grad in (False, True):
        for cached in (False, True):
            with torch.set_grad_enabled(grad):
                out = model(ids, output_hidden_states=True, use_cache=cached)
                assert error(out.logits, plain) < 1e-9
                assert len(out.hidden_states) == SIZES["num_layers"] + 1
                assert all(error(x, y) < 1e-9 for x, y in zip(out.hidden_states, seen))
                padded = model(ids, attention_mask=keep, output_hidden_states=True, use_cache=cached).hidden_states
                alone = model(ids[1:, 2:], output_hidden_states=True).hidden_states
                assert all(error(x[1, 2:], y[0]) < 1e-9 for x, y in zip(padded, alone))
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == SIZES["num_layers"] + 1
    generated = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True)
    assert [len(step) for step in generated.hidden_states] == [SIZES["num_layers"] + 1] * 3
    model.config.output_hidden_states = False
    assert model(ids).hidden_states is None
    model.config.return_dict = False
    assert isinstance(model(ids), tuple)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_act_the_same_with_and_without_a_cache(name: str) -> None:
    """A vector added to what a module returns: every module that can be named, in forward passes, padded ones and generate."""
    model, ids = of(name), drawn(2, 6)
    keep = torch.tensor([[1] * 6, [0, 1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": keep, "pad_token_id": 0, "eos_token_id": None}

    def move(module: torch.nn.Module, given: Any, output: Any) -> Any:
        key = (
            None
            if isinstance(output, Tensor)
            else 0
            if isinstance(output, tuple)
            else "logits"
            if "logits" in output
            else "last_hidden_state"
        )
        first = output if key is None else output[key]
        first = first * 0.5 + torch.linspace(-1, 1, first.shape[-1], dtype=first.dtype)
        if isinstance(key, str):
            return type(output)(**{**output, key: first})
        return first if key is None else (first, *output[1:])

    plain = model(ids, attention_mask=keep).logits
    for place in ("", "model", "model.embeddings", "model.layers.0", "model.layers.1.mixer", "model.norm", "head"):
        calls: list[int] = []
        module = model.get_submodule(place)
        handle = module.register_forward_hook(lambda *given, calls=calls: calls.append(1) or move(*given))
        with torch.no_grad():
            whole = model(ids, attention_mask=keep, use_cache=False).logits
            assert error(model(ids, attention_mask=keep, use_cache=True).logits, whole) < 1e-9, place
            calls.clear()
            found = model.generate(ids, **options)
            assert len(calls) == 3, place
            assert torch.equal(found, model.generate(ids, **options, use_cache=False)), place
        trained = model(ids, attention_mask=keep, labels=ids).logits
        handle.remove()
        assert error(trained, whole) < 1e-9, place
        assert error(whole, plain) > 1e-6, place


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
    model = of("gla", torch.float32)
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


@pytest.mark.parametrize("rescale_every", [0, 1])
def test_hidden_states_of_float16_models_are_not_halved(rescale_every: int) -> None:
    """The residual stream is halved inside of such models."""
    model = model_of("rwkv6")
    config = replace(model.config, rescale_every=rescale_every)
    half = CausalLM(config)
    half.load_state_dict(model.state_dict())
    wrapped, wanted, ids = PenstockForCausalLM.of(half.half().eval()), PenstockForCausalLM.of(model.eval()), drawn(2, 7)
    for cached in (False, True):
        with torch.no_grad():
            found = wrapped(ids, output_hidden_states=True, use_cache=cached).hidden_states
            assert all(error(x, y) < 5e-3 for x, y in zip(found, wanted(ids, output_hidden_states=True, use_cache=cached).hidden_states))


def test_wrapped_embeddings() -> None:
    """A module in the place of the embeddings needs no ``weight`` of its own."""
    model, ids = model_of("gla"), drawn(2, 5)
    wanted = model(ids).logits
    model.embeddings = torch.nn.Sequential(model.embeddings)
    for cached in (False, True):
        assert torch.equal(PenstockForCausalLM.of(model)(ids, use_cache=cached).logits, wanted)
    assert PenstockModel.of(model).config.dtype == torch.float32


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batches_without_tokens(name: str, shape: tuple[int, int]) -> None:
    model, ids = PenstockForCausalLM.of(model_of(name)), torch.zeros(shape, dtype=torch.int64)
    for cached in (False, True):
        for mask in (None, torch.ones_like(ids)):
            output = model(ids, attention_mask=mask, labels=ids, use_cache=cached, output_hidden_states=True)
            assert output.logits.shape == (*shape, SIZES["vocab_size"])
            assert {x.shape for x in output.hidden_states} == {(*shape, SIZES["hidden_size"])}
            assert output.loss.isnan()
