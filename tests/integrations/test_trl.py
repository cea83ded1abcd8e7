"""TRL's trainers take a model as an object and by path, packed, without padding and with an adapter."""

import pytest
import torch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM  # noqa: E402

import penstock.models.huggingface  # noqa: E402, F401

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("name", ["rwkv6", "gla", "retnet", "mamba2"]),
]
TEXTS = [{"text": f"hello world {n}" * (n % 3 + 1)} for n in range(8)]
PAIRS = [{"prompt": "a b", "completion": " c d"}] * 8
CHOICES = [{"prompt": "a b", "chosen": " c d", "rejected": " e"}] * 8
PROMPTS = [{"prompt": "a"}, {"prompt": "abc"}] * 4
LORA = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def options(tmp_path):
    return {
        "output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "bf16": False, "logging_steps": 1, "learning_rate": 1e-2,
    }  # fmt: skip


def trained(trainer) -> list[float]:
    """Weights change, and losses are numbers."""
    model = trainer.model
    before = {name: x.detach().clone() for name, x in model.named_parameters() if x.requires_grad}
    trainer.train()
    assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters() if name in before)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(torch.isfinite(torch.tensor(losses)))
    return losses


FINE_TUNING = {
    "object": {},
    "path": {},
    "completions": {"completion_only_loss": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
    "bfd": {"packing": True, "max_length": 32},
    "padding-free": {"padding_free": True, "max_length": None},
    "lora": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("kind", FINE_TUNING)
def test_supervised_fine_tuning(name, kind, folders, tokenizer, tmp_path) -> None:
    model = str(folders[name]) if kind == "path" else AutoModelForCausalLM.from_pretrained(folders[name])
    data = datasets.Dataset.from_list(PAIRS if kind == "completions" else TEXTS)
    settings = trl.SFTConfig(**options(tmp_path), **FINE_TUNING[kind])
    adapter = peft.LoraConfig(**LORA) if kind == "lora" else None
    trained(trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, peft_config=adapter))


def test_batches_without_padding_have_the_losses_of_padded_ones(name, folders, tokenizer, tmp_path) -> None:
    """A sample that saw another's state would change them."""
    losses = {}
    for kind in ("object", "padding-free"):
        model = AutoModelForCausalLM.from_pretrained(folders[name])
        settings = trl.SFTConfig(**options(tmp_path), **FINE_TUNING[kind])
        data = datasets.Dataset.from_list(TEXTS)
        losses[kind] = trained(trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer))
    assert losses["padding-free"] == pytest.approx(losses["object"], rel=1e-3)


@pytest.mark.parametrize("adapter", [False, True])
def test_direct_preference_optimisation(name, adapter, folders, tokenizer, tmp_path) -> None:
    model, settings = AutoModelForCausalLM.from_pretrained(folders[name]), trl.DPOConfig(**options(tmp_path))
    lora, data = peft.LoraConfig(**LORA) if adapter else None, datasets.Dataset.from_list(CHOICES)
    trained(trl.DPOTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, peft_config=lora))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_policies_that_generate(name, kind, folders, tokenizer, tmp_path) -> None:
    settings = getattr(trl, f"{kind}Config")(**options(tmp_path), num_generations=2, max_completion_length=5)
    trainer = getattr(trl, f"{kind}Trainer")(
        AutoModelForCausalLM.from_pretrained(folders[name]), args=settings, processing_class=tokenizer,
        reward_funcs=lambda completions, **others: [float(sum(map(ord, one)) % 97) for one in completions],
        train_dataset=datasets.Dataset.from_list(PROMPTS),
    )  # fmt: skip
    trained(trainer)
