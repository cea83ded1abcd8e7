"""transformers beyond a model's own calls: stop strings, streamers, pipelines."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM  # noqa: E402

import penstock.models.huggingface  # noqa: E402, F401

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("name", ["rwkv6", "gla", "retnet", "mamba2"])]


def test_stop_strings(name, folders, tokenizer) -> None:
    model, given = AutoModelForCausalLM.from_pretrained(folders[name]), tokenizer("hello", return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**given, **options)[0, 5:].tolist()
    assert model.generate(**given, **options, tokenizer=tokenizer)[0, 5:].tolist() == plain
    for n, token in enumerate(plain):
        stop = tokenizer.decode([token])
        if stop.isascii() and stop.strip() and token not in plain[:n]:
            found = model.generate(**given, **options, stop_strings=[stop], tokenizer=tokenizer)[0, 5:].tolist()
            assert found == plain[: n + 1]
            config = transformers.GenerationConfig(**options, stop_strings=[stop])
            assert model.generate(**given, generation_config=config, tokenizer=tokenizer)[0, 5:].tolist() == found
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**given, **options, stop_strings=["a"])


def test_streamers(name, folders, tokenizer) -> None:
    model, given = AutoModelForCausalLM.from_pretrained(folders[name]), tokenizer("hello", return_tensors="pt")
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    found = model.generate(**given, max_new_tokens=8, do_sample=False, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(found[0, 5:])


def test_pipelines(name, folders, tokenizer) -> None:
    options = {"max_new_tokens": 4, "do_sample": False}
    for model in (AutoModelForCausalLM.from_pretrained(folders[name]), str(folders[name])):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        alone = [pipe(text, **options)[0]["generated_text"] for text in ("ab", "abcdef")]
        assert [found[0]["generated_text"] for found in pipe(["ab", "abcdef"], **options, batch_size=2)] == alone
        chat = pipe([{"role": "user", "content": "hi"}], **options)[0]["generated_text"]
        assert [message["role"] for message in chat] == ["user", "assistant"]
    pipe = transformers.pipeline("feature-extraction", model=str(folders[name]), tokenizer=tokenizer)
    assert torch.tensor(pipe("abc")).shape == (1, 3, 32)
