"""PEFT: adapters on every linear map, merged and saved; prompt tuning; names of base models."""

import shutil

import pytest
import torch
from formulas import error

from penstock import RangeError

peft = pytest.importorskip("peft")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from penstock.models.huggingface import PenstockForCausalLM  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("name", ["rwkv6", "gla", "retnet", "mamba2"])]
IDS = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(1))
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS), "pad_token_id": 257, "eos_token_id": None}


def steps(model) -> None:
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], 1e-2)
    model.train()
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("kind", ["LoraConfig", "MissConfig", "VeraConfig"])
def test_adapters_train_generate_merge_and_load(name, kind, folders, tmp_path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folders[name])
    rank = {"VeraConfig": {"r": 2, "target_modules": "all-linear"}}.get(kind, {"r": 2, "target_modules": "all-linear"})
    try:
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folders[name]), getattr(peft, kind)(task_type="CAUSAL_LM", **rank))
    except ValueError as problem:
        pytest.skip(f"peft: {problem}")
    steps(model)
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
        assert error(wanted, plain(IDS).logits) > 1e-3
        assert error(model(input_ids=IDS).logits, wanted) < 1e-5
    generated = model.generate(input_ids=IDS, **OPTIONS)
    assert torch.equal(generated, model.generate(input_ids=IDS, **OPTIONS, use_cache=False))
    model.save_pretrained(tmp_path)
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    assert again.peft_config["default"].base_model_name_or_path == str(folders[name])
    assert error(again(input_ids=IDS).logits, wanted) < 1e-5
    merged = model.merge_and_unload()
    assert error(merged(IDS).logits, wanted) < 1e-4


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, PenstockForCausalLM])
def test_the_folder_of_an_adapter_is_a_model(name, kind, folders, tmp_path) -> None:
    """As for transformers' own models; also where the adapter lies in the folder of its model."""
    options = {"r": 2, "target_modules": "all-linear", "modules_to_save": ["head"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folders[name]), peft.LoraConfig(**options))
    steps(model)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path / "apart")
    shutil.copytree(folders[name], tmp_path / "inside")
    shutil.copytree(tmp_path / "apart", tmp_path / "inside", dirs_exist_ok=True)
    for place, subfolder in (("apart", ""), ("inside", ""), ("", "apart")):
        if kind is AutoModelForCausalLM and subfolder:
            continue  # Auto classes look for the configuration there
        found = kind.from_pretrained(tmp_path / place, subfolder=subfolder, adapter_name="mine")
        assert found.active_adapters() == ["mine"]
        assert error(found(IDS).logits, wanted) < 1e-5
    tensors = load_file(tmp_path / "apart" / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "apart" / "adapter_model.safetensors")
    with pytest.raises(RangeError, match=r"adapter must be an adapter of this model, with all its weights, in .* got none for"):
        kind.from_pretrained(tmp_path / "apart")


def test_prompt_tuning(name, folders) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folders[name])
    sizes = {"token_dim": 32, "num_layers": 2, "num_attention_heads": 4}
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folders[name]), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, **sizes)
    )
    steps(model)
    virtual = model.get_prompt(2)
    embeds = torch.cat([virtual, plain.get_input_embeddings()(IDS)], 1)
    with torch.no_grad():
        assert (
            error(model(input_ids=IDS, attention_mask=OPTIONS["attention_mask"]).logits[:, 4:], plain(inputs_embeds=embeds).logits[:, 4:])
            < 1e-5
        )
    options = OPTIONS | {"attention_mask": torch.ones(2, 11, dtype=torch.int64)}
    wanted = plain.generate(inputs_embeds=embeds, **options)
    assert torch.equal(model.generate(input_ids=IDS, **OPTIONS)[:, -4:], wanted[:, -4:])
