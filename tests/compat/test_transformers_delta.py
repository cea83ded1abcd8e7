"""accelerate() of models of the delta rule: Qwen3-Next, Qwen3.5, OLMo-Hybrid and Kimi Linear of transformers, unmodified."""

import inspect

import pytest
import torch
from torch import nn

from penstock.compat.transformers import accelerate

transformers = pytest.importorskip("transformers", minversion="5.23")  # the first that has these functions in all of these models

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "pad_token_id": 0}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MODELS = {
    "Qwen3Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**LINEAR, **EXPERTS, "num_key_value_heads": 2, "head_dim": 8}),
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**LINEAR, "num_key_value_heads": 2, "head_dim": 8}),
    "OlmoHybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**LINEAR, "linear_num_key_heads": 4, "num_key_value_heads": 2}),
    "KimiLinear": (
        "KimiLinearConfig", "KimiLinearForCausalLM",
        {
            "linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
            "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": None,
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request, monkeypatch):
    """A small model in float32 with weights that differ from their initial values."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    config, kind, sizes = MODELS[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(getattr(transformers, config)(**SIZES, **sizes)).eval()
    for name, x in made.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            nn.init.normal_(x)
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
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
        with accelerate(model):
            prompt = model(ids[:, :13], use_cache=True)
            parts, cache = [prompt.logits], prompt.past_key_values
            for piece in ids[:, 13:].split([5, 1, 1, 1], 1):
                step = model(piece, past_key_values=cache, use_cache=True)
                parts, cache = [*parts, step.logits], step.past_key_values
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-3, atol=1e-5)


def test_generates_the_same_tokens(model):
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    theirs = model.generate(ids, **options)
    with accelerate(model):
        assert torch.equal(model.generate(ids, **options), theirs)


def test_what_was_replaced_and_restored(model):
    module = inspect.getmodule(type(model))
    names = [name for name in vars(module) if name.endswith(("gated_delta_rule", "kimi_delta_attention"))]
    before = [getattr(module, name) for name in names]
    with accelerate(model) as accelerated:
        assert accelerated.replaced == tuple(sorted((f"{module.__name__}.{name}" for name in names), key=accelerated.replaced.index))
        assert len(accelerated.replaced) == len(names) == 2
        assert all(getattr(module, name) is not one for name, one in zip(names, before))
    assert [getattr(module, name) for name in names] == before
