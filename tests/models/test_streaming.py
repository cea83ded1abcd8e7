"""Generation token by token equals generation of the whole."""

import pytest
import torch

from penstock import DtypeError, RangeError, ShapeError
from penstock.models import CausalLM, gla, rwkv6, streaming
from penstock.models.streaming import stream


@pytest.fixture(scope="module", params=["rwkv6", "gla"])
def model(request):
    torch.manual_seed(3)
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_layers": 2, "intermediate_size": 16}
    config = rwkv6(**sizes, head_size=8, mix_rank=2, decay_rank=2) if request.param == "rwkv6" else gla(**sizes, num_heads=2)
    model = CausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("temperature", "top_p"), [(0, 1.0), (1.0, 0.9)])
def test_streamed_tokens_equal_generated_ones(model, monkeypatch, temperature, top_p):
    whole = model.generate(torch.tensor([PROMPT]), 12, temperature=temperature, top_p=top_p, generator=generator())[0].tolist()
    assert list(stream(model, PROMPT, 12, temperature=temperature, top_p=top_p, generator=generator())) == whole
    monkeypatch.setattr(streaming, "PROMPT_TOKENS", 3)  # the prompt is read in pieces
    assert list(stream(model, PROMPT, 12, temperature=temperature, top_p=top_p, generator=generator())) == whole


def test_a_stream_ends_before_its_end_token(model):
    whole = list(stream(model, PROMPT, 30, generator=generator()))
    end = whole[7]
    assert list(stream(model, PROMPT, 30, end=end, generator=generator())) == whole[: whole.index(end)]
    assert list(stream(model, PROMPT, 0)) == []


def test_tokens_that_the_tokenizer_lacks_are_not_sampled(model):
    assert max(stream(model, PROMPT, 40, vocab_size=5, temperature=5.0, generator=generator())) < 5


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ShapeError, "stream: prompt must be at least one token, got none", {"prompt": []}),
        (RangeError, "vocab_size must be from 1 to the model's 20, got 21", {"vocab_size": 21}),
        (DtypeError, "count must be a whole number", {"count": 1.5}),
        (RangeError, "top_p must be above 0", {"top_p": 0.0}),
    ],
)
def test_wrong_arguments_raise_at_once(model, error, message, options):
    with pytest.raises(error, match=message):
        stream(model, **({"prompt": PROMPT, "count": 2} | options))
