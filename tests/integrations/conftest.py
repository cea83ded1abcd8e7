"""A small folder with a model and a byte tokenizer, as users have one."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="session")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={**{letter: n for n, letter in enumerate(alphabet)}, "<eos>": 256, "<pad>": 257}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    found.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return found


CONFIGS = {
    "rwkv6": {"head_size": 8},
    "gla": {"num_heads": 2},
    "retnet": {"num_heads": 2},
    "mamba2": {"head_dim": 8, "state_size": 8},
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> dict[str, Path]:
    """Folders of models by the names of architectures."""
    from penstock import models

    found = {}
    for name, sizes in CONFIGS.items():
        torch.manual_seed(0)
        model = models.CausalLM(getattr(models, name)(vocab_size=258, hidden_size=32, num_layers=2, **sizes))
        with torch.no_grad():
            for x in model.parameters():
                x += 0.1 * torch.randn_like(x)
        found[name] = tmp_path_factory.mktemp("models") / name
        models.save(model, found[name])
        tokenizer.save_pretrained(found[name])
    return found
