"""The Hugging Face classes: loading, generation, padding, losses, training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from formulas import error
from public_models import tokens
from public_models.published import PUBLISHED
from torch import Tensor
from torch.nn import functional as F

from penstock import DtypeError, InvalidArgument, RangeError, ShapeError
from penstock.layers import SoftmaxAttentionConfig
from penstock.models import CausalLM, gla, hybrid, load, mamba2, retnet, rwkv6, rwkv7, save

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"), pytest.mark.sampled(file=True)]
from transformers import AutoModelForCausalLM  # noqa: E402

from penstock.models.huggingface import CACHE, PenstockConfig, PenstockForCausalLM, StateCache  # noqa: E402

SIZES = {"vocab_size": 13, "hidden_size": 16, "num_layers": 2}
CONFIGS = {
    "rwkv6": rwkv6(**SIZES, head_size=8),
    "rwkv7": rwkv7(**SIZES, head_size=8),
    "gla": gla(**SIZES, num_heads=2, conv_size=4),
    "retnet": retnet(**SIZES, num_heads=2),
    "mamba2": mamba2(**SIZES, head_dim=8, state_size=8),
}


def random_model(name: str) -> CausalLM:
    """No weights are zero, as some are at first."""
    torch.manual_seed(1)
    model = CausalLM(CONFIGS[name])
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * (0.3 if x.dim() != 2 else x.shape[-1] ** -0.5))
    return model.eval()


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PenstockForCausalLM:
    return PenstockForCausalLM.of(random_model(request.param))


IDS = torch.stack([tokens(9, 13, seed) for seed in (1, 2, 3)])


@pytest.mark.parametrize(
    "name",
    ["hf rwkv5.2", "hf rwkv6", "fla rwkv6", "fla rwkv7", "fla gla shared", "fla retnet", "fla gated_deltanet", "fla kda hybrid"],
)
def test_public_folders_load_by_their_model_type(name: str, tmp_path: Path) -> None:
    path = PUBLISHED[name].write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model) is PenstockForCausalLM
    ids = tokens(12, 13)
    with torch.no_grad():
        assert error(model(ids[None]).logits[0], PUBLISHED[name].logits(ids)) < 1e-5
    model.save_pretrained(tmp_path / "again")
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), load(tmp_path / "again").parameters()))


def test_saved_folders_in_both_directions(model: PenstockForCausalLM, tmp_path: Path) -> None:
    save(model.causal_lm(), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        for again in (AutoModelForCausalLM.from_pretrained(tmp_path / folder).causal_lm(), load(tmp_path / folder)):
            assert again.config == model.model.sizes
            assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.causal_lm().state_dict().items())
    half, info = PenstockForCausalLM.from_pretrained(tmp_path / "ours", dtype="bfloat16", fuse_loss=True, output_loading_info=True)
    assert half.dtype == torch.bfloat16
    assert half.config.fuse_loss
    assert not info["missing_keys"]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (13, 16, 2)
    fresh = AutoModelForCausalLM.from_config(config)
    assert fresh.model.sizes == model.model.sizes


def greedy(model: PenstockForCausalLM, ids: Tensor, count: int = 8, **options: object) -> Tensor:
    options.setdefault("attention_mask", torch.ones_like(ids))  # else tokens that equal pad_token_id would be padding
    return model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


def test_greedy_generation_equals_our_own(model: PenstockForCausalLM) -> None:
    found = greedy(model, IDS)
    assert torch.equal(found[:, 9:], model.causal_lm().generate(IDS, 8, temperature=0))
    assert torch.equal(found, greedy(model, IDS, use_cache=False))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padded_batches_equal_sequences_alone(model: PenstockForCausalLM, side: str) -> None:
    """Wherever the padding is."""
    lengths = [4, 9, 6]
    keep = torch.zeros(3, 9, dtype=torch.int64)
    for row, length in zip(keep, lengths):
        row[{"left": slice(9 - length, None), "right": slice(length), "middle": slice(0, length - 1)}[side]] = 1
        if side == "middle":
            row[-1] = 1
    ids = torch.where(keep == 1, IDS, 7)
    alone = [row[mask == 1][None] for row, mask in zip(ids, keep)]
    with torch.no_grad():
        out = model(ids, attention_mask=keep, labels=ids, use_cache=True)
        assert error(model(ids, attention_mask=keep, use_cache=True).logits, out.logits) < 1e-5
    for n, one in enumerate(alone):
        with torch.no_grad():
            assert error(out.logits[n][keep[n] == 1], model(one).logits[0]) < 1e-5
        for cached in (True, False):
            found = greedy(model, ids, 4, attention_mask=keep, use_cache=cached)[n, 9:]
            assert torch.equal(found, greedy(model, one, 4)[0, one.shape[1] :])
    if side == "left":
        losses = [F.cross_entropy(model(one).logits[0, :-1], one[0, 1:], reduction="sum") for one in alone]
        assert error(out.loss, torch.stack(losses).sum() / sum(length - 1 for length in lengths)) < 1e-5


def test_beam_search_finds_the_best_of_all_continuations(model: PenstockForCausalLM) -> None:
    """With as many beams as there are continuations, beam search is exhaustive: a wrong row of a state would be seen."""
    ids, count = IDS[:1], 2
    every = torch.cartesian_prod(torch.arange(13), torch.arange(13))
    with torch.no_grad():
        logits = model(torch.cat([ids.expand(169, -1), every], 1)).logits.log_softmax(-1)
    scores = sum(logits[:, 8 + i].gather(1, every[:, i : i + 1]) for i in range(count))
    best = every[scores.argmax()]
    assert torch.equal(greedy(model, ids, count, num_beams=13)[0, 9:], best)
    assert torch.equal(greedy(model, IDS[:2], 6, num_beams=3), greedy(model, IDS[:2], 6, num_beams=3, use_cache=False))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_state_continues_a_sequence(model: PenstockForCausalLM, grad: bool, name: str) -> None:
    with torch.set_grad_enabled(grad):
        whole = model(IDS).logits
        cache, parts = None, []
        for piece in IDS.split([1, 3, 5], 1):
            out = model(piece, **{name: cache}, use_cache=True)
            cache = out[CACHE]
            parts.append(out.logits)
        assert cache.get_seq_length() == 9
        assert error(torch.cat(parts, 1), whole) < 1e-5
        assert error(model(IDS, logits_to_keep=2, use_cache=True).logits, whole[:, -2:]) < 1e-5
        assert error(model(IDS, logits_to_keep=1, use_cache=True).logits, whole[:, -1:]) < 1e-5


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_logits_of_chosen_columns(model: PenstockForCausalLM, grad: bool, padded: bool) -> None:
    keep = torch.ones_like(IDS)
    if padded:
        keep[0, :4] = keep[1, 6:] = 0
    with torch.set_grad_enabled(grad):
        whole = model(IDS, attention_mask=keep).logits
        for which, wanted in (
            (torch.tensor([2, -1, 8]), whole[:, [2, 8, 8]]),
            (torch.tensor([[0, 5], [6, 1], [8, 8]]), whole[[[0], [1], [2]], [[0, 5], [6, 1], [8, 8]]]),
            (IDS[0] > 5, whole[:, IDS[0] > 5]),
            (IDS > 5, whole[IDS > 5]),
            (torch.tensor([], dtype=torch.int64), whole[:, :0]),
        ):
            found = model(IDS, attention_mask=keep, logits_to_keep=which).logits
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_generation_from_a_state(model: PenstockForCausalLM) -> None:
    wanted = greedy(model, IDS)
    for count, kind in ((4, None), (8, None), (9, RangeError), (12, RangeError)):
        with torch.no_grad():
            cache = model(wanted[:, :count], use_cache=True)[CACHE]
        if kind is None:
            assert torch.equal(greedy(model, IDS, **{CACHE: cache}), wanted)
            continue
        message = f"generate: {CACHE} must be of fewer tokens than input_ids, which are 9, got {count}"
        with pytest.raises(kind, match=message):
            greedy(model, IDS, **{CACHE: cache})


def test_losses(model: PenstockForCausalLM) -> None:
    labels = IDS.masked_fill(IDS == 3, -100)
    logits = model(IDS).logits
    true = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    out = model(IDS, labels=labels)
    assert error(out.loss, true) < 1e-5
    assert error(out.logits, logits) < 1e-6
    counted = int((labels[:, 1:] != -100).sum())
    assert error(model(IDS, labels=labels, num_items_in_batch=torch.tensor(5)).loss, true * counted / 5) < 1e-5
    assert all(model(IDS, labels=torch.full_like(IDS, -100), num_items_in_batch=count).loss == 0 for count in (0, torch.tensor(0)))
    packed, starts = IDS.flatten()[None], torch.arange(0, 28, 9)
    assert error(model(packed, labels=labels.flatten()[None], cu_seqlens=starts).loss, true) < 1e-5
    model.config.fuse_loss = True
    model.train()
    fused = model(IDS, labels=labels)
    model.config.fuse_loss = False
    model.eval()
    assert fused.logits is None
    assert error(fused.loss, true) < 1e-5


def test_gradient_checkpointing_changes_no_gradient(model: PenstockForCausalLM) -> None:
    model.train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    assert model.model.gradient_checkpointing
    assert all(torch.equal(x, y) for x, y in zip(plain, gradients()))
    model.gradient_checkpointing_disable()
    assert not model.model.gradient_checkpointing


def test_a_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    def trainer(steps: int) -> transformers.Trainer:
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, save_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, gradient_checkpointing=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]
        return transformers.Trainer(
            PenstockForCausalLM(PenstockConfig.of(CONFIGS["gla"])), arguments, train_dataset=data, eval_dataset=data[:4]
        )

    whole = trainer(4)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert whole.evaluate()["eval_loss"] < losses[0]
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, x), y in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert error(y, x) < 1e-5, name
    assert torch.equal(load(tmp_path / "checkpoint-4").head.weight, resumed.model.head.weight)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_trainer_smooths_the_labels_of_the_next_tokens(name: str, tmp_path: Path) -> None:
    model = PenstockForCausalLM.of(model_of(name)).eval()
    ids = tokens(18, 13).view(2, 9)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.2, use_cpu=True, report_to=[])
    loss = transformers.Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.2)
    assert error(loss, expected) < 1e-5


def test_tied_and_resized_embeddings(tmp_path: Path) -> None:
    config = mamba2(**SIZES, head_dim=8, state_size=8, tie_embeddings=True)
    model = PenstockForCausalLM(PenstockConfig.of(config)).eval()
    assert model.head.weight is model.model.embeddings.weight
    model.save_pretrained(tmp_path / "tied")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    assert again.head.weight is again.model.embeddings.weight
    again.resize_token_embeddings(20)
    assert again(torch.tensor([[19]])).logits.shape == (1, 1, 20)
    again.save_pretrained(tmp_path / "larger")
    assert load(tmp_path / "larger").config.vocab_size == 20


def test_hybrids_generate(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = PenstockForCausalLM.of(CausalLM(hybrid(CONFIGS["gla"], SoftmaxAttentionConfig(num_heads=2), [1])).eval())
    assert torch.equal(greedy(model, IDS)[:, 9:], model.causal_lm().generate(IDS, 8, temperature=0))


def test_errors(tmp_path: Path) -> None:
    model = PenstockForCausalLM.of(random_model("gla"))
    for options, kind, message in (
        ({"inputs_embeds": torch.zeros(3, 9, 16)}, RangeError, "inputs_embeds must be None with input_ids, got both"),
        ({"attention_mask": 2 * torch.ones_like(IDS)}, RangeError, "attention_mask must be 0 for padding and 1 for tokens, got 2"),
        ({"attention_mask": -1e9 * torch.ones(3, 9)}, RangeError, "attention_mask must be 0 for padding and 1 for tokens, got -1000000000"),
        ({"attention_mask": torch.ones(3, 1, 9, 9)}, ShapeError, r"attention_mask must be of shape \[3, 9\], got \[3, 1, 9, 9\]"),
        ({"attention_mask": torch.ones(3, 12)}, ShapeError, r"attention_mask must be of shape \[3, 9\], got \[3, 12\]"),
        ({"cu_seqlens": torch.tensor([0, 9])}, RangeError, r"cu_seqlens must be offsets that begin at 0, .* end at B T = 27, got \[0, 9\]"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 40, 27]), "attention_mask": torch.tensor([[0] + [1] * 8] * 3)},
            RangeError,
            r"cu_seq_lens_q must be offsets that begin at 0, never fall and end at B T = 27, got \[0, 40, 27\]",
        ),
        ({"attention_mask": torch.zeros_like(IDS)}, RangeError, "attention_mask must be 1 for at least one token, got padding only"),
        ({"labels": IDS[:, 1:]}, ShapeError, r"labels must be of shape \[3, 9\], as input_ids, got \[3, 8\]"),
        ({"logits_to_keep": -1}, RangeError, "logits_to_keep must be at least 0, got -1"),
        ({"logits_to_keep": [1]}, DtypeError, "logits_to_keep must be an int or a torch.Tensor"),
        ({"logits_to_keep": torch.ones(2)}, DtypeError, "logits_to_keep must be int64, int32 or bool, got torch.float32"),
        ({"logits_to_keep": torch.tensor([9])}, RangeError, "logits_to_keep must be from -9 to 8, got 9"),
        ({"logits_to_keep": torch.tensor([[1]])}, ShapeError, r"logits_to_keep must be of shape \[n\] or \[3, n\], got \[1, 1\]"),
        ({"logits_to_keep": IDS[:2] > 5}, ShapeError, r"logits_to_keep must be of shape \[9\] or \[3, 9\], got \[2, 9\]"),
        ({"output_attentions": True}, RangeError, "output_attentions must be False"),
        ({"outptu_hidden_states": True}, TypeError, "outptu_hidden_states is no argument of this model"),
        ({"past_key_values": transformers.DynamicCache()}, DtypeError, "past_key_values must be a StateCache, got DynamicCache"),
        ({"cache": transformers.DynamicCache()}, DtypeError, "cache must be a StateCache, got DynamicCache"),
        ({"past_key_values": StateCache(model.model.initial_state(2))}, InvalidArgument, "state"),
        ({name: StateCache(model.model.initial_state(3)) for name in ("cache", "past_key_values")}, RangeError, "cache must be None with"),
    ):
        with pytest.raises(kind, match=message), torch.no_grad():
            model(IDS, **options)
    with torch.no_grad():
        past, wide = model(IDS, use_cache=True)[CACHE], torch.ones(3, 20)
        with pytest.raises(ShapeError, match=r"of shape \[3, 9\] or, with the tokens of the cache, \[3, 18\], got \[3, 20\]"):
            model(IDS, attention_mask=wide, **{CACHE: past})
        assert error(model(IDS, attention_mask=wide[:, :18], **{CACHE: past}).logits, model(torch.cat([IDS, IDS], 1)).logits[:, 9:]) < 1e-5
    for given, kind, message in (
        (IDS[0], ShapeError, r"input_ids must be a tensor of shape \[B,T\], got \[9\]. One sequence is input_ids\[None\]"),
        (IDS.tolist(), ShapeError, r"input_ids must be a tensor of shape \[B,T\], got \[\["),
        (IDS[:, :0], ShapeError, r"generate: input_ids must be of shape \[B,T\] with B and T at least 1, got \[3, 0\]"),
        (IDS[:0], ShapeError, r"with B and T at least 1, got \[0, 9\]"),
        (IDS + 13, RangeError, "ids must be from 0 to 12, got"),
    ):
        with pytest.raises(kind, match=message):
            model.generate(given, max_new_tokens=2)
    with torch.no_grad():
        model.head.weight[0] = torch.nan
    for options in ({}, {"num_beams": 2}, {"use_cache": False}):
        with pytest.raises(RangeError, match="generate: logits must be numbers, got NaN"):
            greedy(model, IDS, **options)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        greedy(model, IDS[:1], assistant_model=model)
    with pytest.raises(RangeError, match="from_pretrained: arguments must be of this model, got quantization_config"):
        PenstockForCausalLM.from_pretrained(tmp_path, quantization_config={})
    for device_map in ({"model.embeddings": 0, "": 1}, "sequential"):
        with pytest.raises(RangeError, match="device_map must be one device"):
            PenstockForCausalLM.from_pretrained(tmp_path, device_map=device_map)
