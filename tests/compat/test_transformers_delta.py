"""accelerate() of models of the delta rule: those of transformers, unmodified."""

import inspect
import re

import pytest
import torch
from torch import nn

from penstock.compat.transformers import accelerate
from penstock.errors import RangeError, ShapeError

transformers = pytest.importorskip("transformers", minversion="5.23")  # the first that has these functions in all of these models

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "pad_token_id": 0}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
KDA = {"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}
LATENT = {
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"], "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MODELS = {
    "Qwen3Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**LINEAR, **EXPERTS, "num_key_value_heads": 2, "head_dim": 8}),
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**LINEAR, "num_key_value_heads": 2, "head_dim": 8}),
    "OlmoHybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**LINEAR, "linear_num_key_heads": 4, "num_key_value_heads": 2}),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**LINEAR, **EXPERTS, "num_key_value_heads": 2, "head_dim": 8}),
    "KimiLinear": ("KimiLinearConfig", "KimiLinearForCausalLM", {**LATENT, **KDA, "q_lora_rank": None}),
    "Ling": ("BailingHybridConfig", "BailingHybridForCausalLM", {**LATENT, "head_dim": 8, "num_key_value_heads": 4, "eos_token_id": None}),
}  # fmt: skip
OTHERS = {
    "GLM": (
        "Glm5NextTextConfig", "Glm5NextTextModel",
        {
            **LATENT, **KDA, **EXPERTS, "qk_rope_head_dim": 0, "q_lora_rank": 8, "num_key_value_heads": 4, "index_topk": 4,
            "index_head_dim": 8, "index_n_heads": 2, "hc_mult": 2, "index_kpool": 2,
        },
    ),
    "Qwen4": (
        "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM",
        {
            **LINEAR, **EXPERTS, "layer_types": ["linear_attention"] * 2, "num_key_value_heads": 2, "head_dim": 8, "hc_count": 2,
            "hc_lowrank": 4, "ple_layer_ids": [],
        },
    ),
}  # fmt: skip
"""Models that are built in parts, or that need more than tokens."""


@pytest.fixture(params=MODELS)
def model(request, monkeypatch):
    """A small model in float32 with weights that differ from their initial values."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return built(*MODELS[request.param])


def built(config, kind, sizes):
    torch.manual_seed(0)
    made = getattr(transformers, kind)(getattr(transformers, config)(**SIZES, **sizes)).eval()
    for name, x in made.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            nn.init.normal_(x)
        elif x.dim() > 1:
            nn.init.normal_(x, std=0.2)
    return made


def tokens(length=21):
    return torch.randint(1, 40, (2, length), generator=torch.Generator().manual_seed(2))


def left_padded():
    ids, mask = tokens(), torch.ones(2, 21, dtype=torch.long)
    ids[0, :6], mask[0, :6] = 0, 0
    return ids, mask


def test_logits_and_gradients_are_the_same(model):
    ids, mask = left_padded()
    found = []
    for accelerated in (False, True):
        replacement = accelerate(model) if accelerated else None
        model.train()
        model.zero_grad()
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        found.append([output.logits[mask.bool()], output.loss, *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    replacement.restore()
    assert len(found[0]) == len(found[1])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_with_a_cache(model):
    """Its name is another one since transformers 5.24."""
    ids = tokens()
    name = next(one for one in ("cache", "past_key_values") if one in inspect.signature(model.forward).parameters)
    with torch.no_grad():
        expected = model(ids).logits
        with accelerate(model):
            prompt = model(ids[:, :13], use_cache=True)
            parts, cache = [prompt.logits], prompt[name]
            for piece in ids[:, 13:].split([5, 1, 1, 1], 1):
                step = model(piece, **{name: cache}, use_cache=True)
                parts, cache = [*parts, step.logits], step[name]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-3, atol=1e-5)


def test_generates_the_same_tokens(model):
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = model.generate(ids, **options)
    with accelerate(model):
        assert torch.equal(model.generate(ids, **options), theirs)


def test_what_was_replaced_and_restored(model):
    module = inspect.getmodule(type(model))
    names = [name for name in vars(module) if name.endswith(("gated_delta_rule", "kimi_delta_attention", "conv1d_fn"))]
    before = [getattr(module, name) for name in names]
    with accelerate(model) as accelerated:
        assert accelerated.replaced == tuple(sorted((f"{module.__name__}.{name}" for name in names), key=accelerated.replaced.index))
        assert len(accelerated.replaced) == len(names) == 3
        assert all(getattr(module, name) is not one for name, one in zip(names, before))
    assert [getattr(module, name) for name in names] == before


@pytest.mark.parametrize("name", OTHERS)
def test_outputs_of_other_models_are_the_same(name, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    if not hasattr(transformers, OTHERS[name][1]):
        pytest.skip("this transformers does not have it")
    model, ids = built(*OTHERS[name]), tokens()
    with torch.no_grad():
        expected = model(ids, use_cache=False)[0]
        with accelerate(model):
            torch.testing.assert_close(model(ids, use_cache=False)[0], expected, rtol=1e-3, atol=1e-4)


LENGTHS = (9, 1, 7, 3)
DESCRIBED = [("cu_seq_lens_q", "cu_seq_lens_k"), ("seq_idx",), ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")]


def packed(lengths, names):
    """Sequences in one row as transformers' collator makes them, with these of its arguments."""
    sequences = [{"input_ids": torch.randint(1, 40, (n,), generator=torch.Generator().manual_seed(n)).tolist()} for n in lengths]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(sequences)
    return {name: batch[name] for name in ("input_ids", "position_ids", *names)}


def each_alone(model, ids):
    return torch.cat([model(one, use_cache=False).logits for one in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("names", DESCRIBED, ids="+".join)
def test_packed_sequences_are_kept_apart(model, names):
    batch = packed(LENGTHS, names)
    with torch.no_grad():
        expected = each_alone(model, batch["input_ids"])
        with accelerate(model):
            torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_recurrent_layers_of_other_models_keep_packed_sequences_apart(name, monkeypatch):
    """GLM's other layers have no masks of packed sequences."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    config, kind, sizes = OTHERS[name]
    if not hasattr(transformers, kind):
        pytest.skip("this transformers does not have it")
    model, batch = built(config, kind, {**sizes, "layer_types": ["linear_attention"] * 2}), packed(LENGTHS, DESCRIBED[0])
    with torch.no_grad():
        expected = torch.cat([model(one, use_cache=False)[0] for one in batch["input_ids"].split(LENGTHS, 1)], 1)
        with accelerate(model):
            torch.testing.assert_close(model(**batch, use_cache=False)[0], expected, rtol=1e-3, atol=1e-4)


def test_gradients_of_packed_sequences_are_those_of_each_alone(model):
    batch, found = packed(LENGTHS, DESCRIBED[0]), []
    upstream = torch.randn(1, sum(LENGTHS), 40, generator=torch.Generator().manual_seed(1))
    for accelerated in (False, True):
        model.zero_grad()
        if accelerated:
            with accelerate(model):
                model(**batch, use_cache=False).logits.backward(upstream)
        else:
            each_alone(model, batch["input_ids"]).backward(upstream)
        found.append([x.grad for x in model.parameters() if x.grad is not None])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_packed_sequences_that_cannot_be_kept_apart_are_refused(model):
    rows = {"input_ids": tokens(6), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)}
    batch = packed(LENGTHS, DESCRIBED[0])
    with torch.no_grad(), accelerate(model):
        with pytest.raises(ShapeError, match="causal_conv1d_fn: seq_idx must be None unless the batch has one row, got 2 rows"):
            model(**rows, use_cache=False)
        with pytest.raises(RangeError, match=r"cu_seq(lens|_lens_q) must be None with a cache, .* Pass use_cache=False"):
            model(**batch, use_cache=True)


@pytest.mark.parametrize("ends", [[0, 9, 17], [9, 17, 20], [0, 17, 9, 20], [0, 9, 21]])
def test_offsets_of_other_tokens_are_refused(model, ends):
    """The first leave out padding after the last sequence."""
    batch = packed(LENGTHS, ()) | {"cu_seq_lens_q": torch.tensor(ends)}
    message = f"cu_seq_lens_q must be offsets that begin at 0, never fall and end at T = 20, got {re.escape(str(ends))}"
    with torch.no_grad(), accelerate(model), pytest.raises(RangeError, match=f"causal_conv1d_fn: {message}"):
        model(**batch, use_cache=False)


def test_offsets_of_keys_are_those_of_queries(model):
    batch = packed(LENGTHS, DESCRIBED[0])
    with torch.no_grad(), accelerate(model):
        with pytest.raises(RangeError, match="causal_conv1d_fn: cu_seq_lens_k must be of the same sequences as cu_seq_lens_q, got other"):
            model(**batch | {"cu_seq_lens_k": torch.tensor([0, 20])}, use_cache=False)
        del batch["cu_seq_lens_q"]
        with pytest.raises(RangeError, match="causal_conv1d_fn: cu_seq_lens_k must be None without cu_seq_lens_q, got a tensor"):
            model(**batch, use_cache=False)


POSITIONS = {
    "alone": (lambda batch: batch, "position_ids must be those of one sequence a row without cu_seq_lens_q or seq_idx"),
    "with a mask": (lambda batch: batch | {"attention_mask": torch.ones(1, 20, dtype=torch.long)}, "position_ids must be those of one"),
}


@pytest.mark.parametrize("given", POSITIONS)
def test_positions_alone_do_not_tell_recurrent_layers_of_packed_sequences(model, given):
    change, message = POSITIONS[given]
    batch = change(packed(LENGTHS, ()))
    with torch.no_grad(), accelerate(model):
        for inner in (False, True):
            with pytest.raises(RangeError, match=f": {message}.*, got packed sequences. Pass cu_seq_lens_q or seq_idx, too"):
                (model.model if inner else model)(**batch, use_cache=False)
        model(batch["input_ids"], use_cache=False)
    model(**batch, use_cache=False)


def test_positions_of_one_sequence_a_row_are_taken(model):
    """With padding, too, whose positions begin again: those that generate() makes, and others."""
    ids, mask = left_padded()
    counted = mask.cumsum(1) - 1
    with torch.no_grad():
        padded = [counted.masked_fill(mask == 0, n) for n in (0, 1)]
        for positions in *padded, torch.arange(21)[None], torch.arange(5, 26)[None]:
            expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            with accelerate(model):
                found = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-5)


def test_gradient_checkpointing_of_packed_sequences(model):
    """The forward pass that is computed again for gradients gets the same sequences."""
    batch, found = packed(LENGTHS, DESCRIBED[0]), []
    model.train()
    for checkpointed in (False, True):
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        with accelerate(model):
            model(**batch, use_cache=False).logits.sin().sum().backward()
        found.append([x.grad for x in model.parameters() if x.grad is not None])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
