"""LoRA by TRL and PEFT, then served beside its base in one batch.

A small RWKV-6 learns sentences about places. A LoRA on all of its linear maps then learns another answer, by TRL's SFTTrainer, packed.
The engine serves base and adapter, which requests choose by name. Needs the extra `integrations`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch

from penstock.engine import Engine, SamplingParams
from penstock.models import CausalLM, load_adapter, rwkv6, save
from penstock.models.huggingface import PenstockForCausalLM
from penstock.models.tokenizers import load_tokenizer

matplotlib.use("agg")
from matplotlib import pyplot

PLACES = {"Oslo": "Norway", "Lima": "Peru", "Cairo": "Egypt", "Quito": "Ecuador", "Accra": "Ghana", "Hanoi": "Vietnam"}
PROMPT = "Lima is in"


def save_tokenizer(folder: Path) -> Any:
    """A tokenizer of bytes, as transformers has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={**{letter: n for n, letter in enumerate(letters)}, "<end>": 256}, merges=[]))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>", pad_token="<end>")
    wrapped.save_pretrained(folder)
    return wrapped


def trained(model: Any, tokenizer: Any, texts: list[str], folder: Path, steps: int, lora: Any = None) -> tuple[Any, list[float]]:
    """TRL's trainer: the model, and its losses."""
    import trl
    from datasets import Dataset

    settings = trl.SFTConfig(
        str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, packing=True, max_length=128, use_cpu=True,
        bf16=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    data = Dataset.from_list([{"text": text} for text in texts])
    trainer = trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> dict[str, Any]:
    """Train, serve, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("lora.png"))
    parser.add_argument("--steps", type=int, default=100, help="of the base model; the LoRA has as many")
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny tensors: more threads wait for each other
    import peft

    torch.manual_seed(0)
    draw = random.Random(0)
    folder = Path(tempfile.mkdtemp())
    tokenizer = save_tokenizer(folder / "base")
    base = CausalLM(rwkv6(vocab_size=257, hidden_size=64, num_layers=2, head_size=32))
    plain = [f"{place} is in {PLACES[place]}." for place in draw.choices(list(PLACES), k=1500)]
    _, before = trained(PenstockForCausalLM.of(base), tokenizer, plain, folder / "run", options.steps)
    save(base.eval(), folder / "base", overwrite=True)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    changed = [f"{place} is in {PLACES[place].upper()}!" for place in draw.choices(list(PLACES), k=1500)]
    model = PenstockForCausalLM.from_pretrained(folder / "base")
    adapted, after = trained(model, tokenizer, changed, folder / "run", options.steps, lora)
    adapted.save_pretrained(folder / "adapter")
    adapter = load_adapter(folder / "adapter", base=folder / "base")
    engine = Engine(base, load_tokenizer(folder / "base"), slots=4, adapters={"loud": adapter})
    sampling = SamplingParams(max_tokens=10, temperature=0)
    answers = {name or "base": engine.generate(PROMPT, sampling, tuning=name)[0].text for name in (None, "loud")}
    engine.close()
    print(f"base: loss {before[0]:.2f} to {before[-1]:.2f}; LoRA: {after[0]:.2f} to {after[-1]:.2f}")
    for name, answer in answers.items():
        print(f"{name}: {PROMPT}{answer!r}")
    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    axes.plot(before, label="base")
    axes.plot(range(len(before), len(before) + len(after)), after, label="LoRA of rank 8, on other answers")
    axes.set(title="loss of TRL's SFTTrainer", xlabel="steps", ylabel="nats per token", ylim=(0, None))
    axes.legend()
    figure.savefig(options.plot, dpi=110)
    return {"before": before, "after": after, "answers": answers}


if __name__ == "__main__":
    main()
