"""accelerate(): against a stand-in for RWKV's remote code, and against transformers' own Mamba-2, unmodified."""

import inspect
import re
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from penstock.compat import transformers as ours
from penstock.compat.transformers import accelerate
from penstock.errors import DtypeError, ImplementationRefused, RangeError

B, T, H, N = 2, 9, 3, 4


def remote_code(version):
    """A modelling module whose function has the contract of the remote code: [B,T,H*n] in, [B,T,H,n] and a state [B,H,K,V] out."""
    module = ModuleType(f"modeling_rwkv{version}")
    name = f"rwkv{version}_linear_attention"

    def linear_attention(training, receptance, key, value, time_decay, time_first, state):
        r, k, v = (x.unflatten(-1, time_first.shape).double() for x in (receptance, key, value))
        decay = torch.exp(-torch.exp(time_decay.double()))
        decay = decay.expand(*r.shape[:2], H * N).unflatten(-1, (H, N)) if version == 6 else decay.reshape(H, -1).expand(*r.shape[:2], H, N)
        state = r.new_zeros(len(r), H, N, N) if state is None else state.double()
        rows = []
        for t in range(r.shape[1]):
            kv = k[:, t, :, :, None] * v[:, t, :, None, :]
            rows.append((r[:, t, :, :, None] * (time_first.double()[:, :, None] * kv + state)).sum(-2))
            state = decay[:, t, :, :, None] * state + kv
        return torch.stack(rows, 1).to(receptance.dtype), state.float()

    class Attention(nn.Module):
        """The state of all layers is one tensor, with the layers last, as there."""

        def __init__(self):
            super().__init__()
            self.receptance, self.key, self.value, self.decay = (nn.Linear(H * N, H * N, bias=False) for _ in range(4))
            self.time_decay, self.time_faaaa = nn.Parameter(torch.randn(H, N)), nn.Parameter(torch.randn(H, N))

        def forward(self, x, state=None):
            r, k, v = self.receptance(x), self.key(x), self.value(x)
            decay = self.time_decay.flatten() + self.decay(x) if version == 6 else self.time_decay
            layer = None if state is None else state[..., 0]
            output, layer = getattr(module, name)(self.training, r, k, v, decay, self.time_faaaa, layer)
            if state is not None:
                state[..., 0] = layer
            return output.reshape(x.shape)

    Attention.__module__ = module.__name__
    setattr(module, name, linear_attention)
    module.Attention = Attention
    return module


@pytest.fixture(params=[5, 6])
def module(request, monkeypatch):
    torch.manual_seed(0)
    made = remote_code(request.param)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_remote_code_gives_the_same_outputs_states_and_gradients(module):
    model, x = nn.Sequential(nn.Identity(), module.Attention()), torch.randn(B, T, H * N)
    found = []
    for accelerated in (False, True):
        if accelerated:
            replacement = accelerate(model)
        state = torch.randn(B, H, N, N, 1, generator=torch.Generator().manual_seed(1))
        output = model[1](x, state)
        model.zero_grad()
        output.sin().sum().backward()
        found.append([output, state, *(y.grad.clone() for y in model.parameters() if y.grad is not None)])
    replacement.restore()
    assert len(found[0]) == len(found[1]) > 6
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_remote_code_decodes_token_by_token(module):
    model, x = module.Attention(), torch.randn(B, T, H * N)
    expected = model(x)
    with accelerate(model), torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
        state = torch.zeros(B, H, N, N, 2)
        parts = [model(x[:, :4], state), *(model(x[:, t : t + 1], state) for t in range(4, T))]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_decay_per_head(monkeypatch):
    """RWKV-5.0 and 5.1."""
    made = remote_code(5)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    model, x = made.Attention(), torch.randn(B, T, H * N)
    model.time_decay = nn.Parameter(torch.randn(H))
    expected = model(x)
    with accelerate(model):
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_what_was_replaced_and_restored(module):
    model = module.Attention()
    name = next(one for one in vars(module) if one.endswith("linear_attention"))
    original = getattr(module, name)
    with accelerate(model) as accelerated:
        assert accelerated.replaced == (f"{module.__name__}.{name}",)
        assert getattr(module, name) is not original
    assert getattr(module, name) is original


def test_models_without_such_functions_are_refused():
    with pytest.raises(RangeError, match=re.escape("accelerate: model must be of a modelling module with one of rwkv5_linear_attention, ")):
        accelerate(nn.Linear(2, 2))
    with pytest.raises(DtypeError, match=re.escape("accelerate: model must be a torch.nn.Module, got 'mamba' of type str")):
        accelerate("mamba")


def test_functions_with_other_parameters_are_refused(module):
    name = next(one for one in vars(module) if one.endswith("linear_attention"))
    other = lambda receptance, key, value, state: None  # noqa: E731
    setattr(module, name, other)
    with pytest.raises(ImplementationRefused, match=re.escape("must have the parameters training, receptance, key, value, time_decay")):
        accelerate(module.Attention())
    assert getattr(module, name) is other


@pytest.fixture(params=[1, 2])
def mamba(request, monkeypatch):
    """A small Mamba2ForCausalLM in float32, without mamba-ssm, whose heads share B and C in groups."""
    pytest.importorskip("transformers", minversion="5.16")  # the first that has these functions
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 40, "state_size": 8, "head_dim": 4, "num_heads": 8, "chunk_size": 8}
    model = Mamba2ForCausalLM(Mamba2Config(**sizes, n_groups=request.param, pad_token_id=0, eos_token_id=None)).eval()
    for block in model.backbone.layers:
        nn.init.normal_(block.mixer.dt_bias)
        nn.init.normal_(block.mixer.D)
    return model


def cache_name(model):
    """The name of the cache in arguments and outputs, which is another one since transformers 5.24."""
    return next(name for name in ("cache", "cache_params") if name in inspect.signature(model.forward).parameters)


def tokens(length=21):
    return torch.randint(1, 40, (2, length), generator=torch.Generator().manual_seed(2))


def left_padded():
    ids, mask = tokens(), torch.ones(2, 21, dtype=torch.long)
    ids[0, :6], mask[0, :6] = 0, 0
    return ids, mask


def test_mamba2_gives_the_same_logits_and_gradients(mamba):
    ids, mask = left_padded()
    found = []
    for accelerated in (False, True):
        replacement = accelerate(mamba) if accelerated else None
        mamba.train()
        mamba.zero_grad()
        output = mamba(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        found.append([output.logits, output.loss, *(x.grad.clone() for x in mamba.parameters())])
    replacement.restore()
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_mamba2_with_a_cache(mamba):
    ids, mask = left_padded()
    name = cache_name(mamba)
    with torch.no_grad():
        expected = mamba(ids, attention_mask=mask).logits
        theirs = mamba(ids, attention_mask=mask, use_cache=True)[name]
        with accelerate(mamba):
            prompt = mamba(ids[:, :13], attention_mask=mask[:, :13], use_cache=True)
            parts, cache = [prompt.logits], prompt[name]
            more = mamba(ids[:, 13:18], **{name: cache}, use_cache=True)  # continue the prompt from the cached state
            parts, cache = [*parts, more.logits], more[name]
            for t in range(18, 21):
                step = mamba(ids[:, t : t + 1], **{name: cache}, use_cache=True)
                parts, cache = [*parts, step.logits], step[name]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(cache.layers, theirs.layers):
        torch.testing.assert_close(mine.recurrent_states[0], other.recurrent_states[0], rtol=1e-4, atol=1e-5)


def test_mamba2_generates_the_same_tokens(mamba):
    ids, mask = left_padded()
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    theirs = mamba.generate(ids, **options)
    with accelerate(mamba):
        mine = mamba.generate(ids, **options)
    assert torch.equal(mine.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(mine.logits), torch.stack(theirs.logits), rtol=1e-4, atol=1e-5)


def test_mamba2_decodes_in_grad_mode_too(mamba):
    ids, name = tokens(), cache_name(mamba)
    expected = mamba(ids).logits
    with accelerate(mamba):
        with torch.no_grad():
            cache = mamba(ids[:, :-1], use_cache=True)[name]
        logits = mamba(ids[:, -1:], **{name: cache}, use_cache=True).logits
    torch.testing.assert_close(logits[:, -1], expected[:, -1], rtol=1e-4, atol=1e-5)
    logits.sum().backward()


@pytest.mark.parametrize("names", ["seq_idx", "cu_seq_lens_q cu_seq_lens_k", "cu_seq_lens_q cu_seq_lens_k seq_idx"])
def test_packed_sequences_are_kept_apart(mamba, names):
    """In training, too, where the fused form gives way to the convolution and the scan. Mamba2ForCausalLM does not pass them on."""
    from transformers import DataCollatorWithFlattening

    parts = [torch.randint(1, 40, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 1, 7, 3)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)([{"input_ids": part} for part in parts])
    given, model, found = {name: batch[name] for name in ("input_ids", *names.split())}, mamba.backbone.train(), []
    for packed in (False, True):
        model.zero_grad()
        if packed:
            with accelerate(mamba):
                states = model(**given, use_cache=False).last_hidden_state
        else:
            states = torch.cat([model(torch.tensor([part]), use_cache=False).last_hidden_state for part in parts], 1)
        states.tanh().sum().backward()
        found.append([states, *(x.grad for x in model.parameters())])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "cu_seq_lens_q"])
def test_packed_sequences_that_layers_are_not_told_of_are_refused(mamba, name):
    """Mamba2ForCausalLM passes none of them on, its backbone not position_ids."""
    given = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "seq_idx": torch.tensor([[0, 0, 0, 1, 1]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 5]),
    }[name]  # fmt: skip
    ids, alone = tokens(5)[:1], torch.arange(5)[None]
    with accelerate(mamba):
        for _ in range(2):
            with pytest.raises(RangeError, match=rf"(causal_conv1d_fn|mamba2_chunk_scan): {name} must be .*, got packed sequences\."):
                mamba(ids, **{name: given}, use_cache=False)
        if name == "position_ids":
            with pytest.raises(RangeError, match="position_ids must be those of one sequence a row"):
                mamba.backbone(ids, position_ids=given, use_cache=False)
            mamba(ids, position_ids=alone, use_cache=False)
        mamba(ids, use_cache=False)
    mamba(ids, **{name: given}, use_cache=False)


def test_remote_code_with_packed_sequences_is_refused(module):
    """Its functions take no offsets."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module.Attention()

        def forward(self, x, position_ids=None):
            return self.layer(x)

    model, x = Model(), torch.randn(1, T, H * N)
    with accelerate(model):
        assert torch.isfinite(model(x, torch.arange(T)[None])).all()
        with pytest.raises(RangeError, match=r"rwkv\d_linear_attention: position_ids must be those of one sequence a row"):
            model(x, torch.arange(T)[None] % 4)


def test_mamba2_says_what_was_replaced(mamba):
    module = sys.modules[type(mamba).__module__]
    names = "mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined", "causal_conv1d_fn"
    originals = [getattr(module, name) for name in names]
    with accelerate(mamba) as accelerated:
        assert accelerated.replaced == tuple(f"{module.__name__}.{name}" for name in names)
    assert [getattr(module, name) for name in names] == originals


def test_mamba2_in_bfloat16(mamba):
    mamba, ids = mamba.to(torch.bfloat16), tokens()
    with torch.no_grad():
        expected = mamba(ids).logits
        with accelerate(mamba):
            torch.testing.assert_close(mamba(ids).logits, expected, rtol=5e-2, atol=5e-2)


def test_the_limits_of_time_steps(mamba):
    for block in mamba.backbone.layers:
        block.mixer.time_step_limit = (0.2, 0.6)
    with torch.no_grad():
        expected = mamba(tokens()).logits
        with accelerate(mamba):
            torch.testing.assert_close(mamba(tokens()).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_hybrid_model_runs_on_our_operators():
    pytest.importorskip("transformers", minversion="5.16")
    from transformers import BambaConfig, BambaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixers = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8, "mamba_n_groups": 1}
    model = BambaForCausalLM(BambaConfig(vocab_size=40, attn_layer_indices=[1], **sizes, **mixers)).eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        with accelerate(model) as accelerated:
            torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    assert "transformers.models.bamba.modeling_bamba.mamba2_chunk_scan" in accelerated.replaced


def test_mamba2_arguments_that_change_the_result_are_refused():
    x, dt, bc = torch.randn(1, 3, 2, 4), torch.rand(1, 3, 2), torch.randn(1, 3, 1, 8)
    A = -torch.rand(2)
    with pytest.raises(RangeError, match="mamba2_chunk_scan: z must be None, got tensor"):
        ours._mamba2_chunk_scan(x, dt, A, bc, bc, 8, z=torch.zeros(1, 3))
    with pytest.raises(RangeError, match="mamba2_chunk_scan: cu_seq_lens_q must be None with a cache, got packed sequences"):
        ours._mamba2_chunk_scan(x, dt, A, bc, bc, 8, return_final_states=True, cu_seq_lens_q=torch.tensor([0, 1, 3]))
    with pytest.raises(RangeError, match=r"mamba2_chunk_scan: cu_seq_lens_q must be offsets that .* end at T = 3, got \[0, 1, 2\]"):
        ours._mamba2_chunk_scan(x, dt, A, bc, bc, 8, cu_seq_lens_q=torch.tensor([0, 1, 2]))
    for name in ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
        with pytest.raises(RangeError, match=f"mamba2_selective_state_update: {name} must be None, got tensor"):
            ours._mamba2_selective_state_update(torch.zeros(1, 2, 4, 8), *[x] * 5, **{name: torch.zeros(1, 3)})
    with pytest.raises(RangeError, match="mamba2_selective_state_update: A must be expanded from one value a head"):
        ours._mamba2_selective_state_update(
            torch.zeros(1, 2, 4, 8), x[:, 0], dt[:, 0, :, None].expand(1, 2, 4), -torch.rand(2, 4, 8), bc[:, 0], bc[:, 0]
        )
