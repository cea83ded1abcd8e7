"""Generation and sampling."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from torch import Tensor

from penstock import RangeError
from penstock.models import CausalLM
from penstock.models.sampling import check_logits, sample
from penstock.models.streaming import stream

BATCH = 2


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return model_of("rwkv6")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(13, (BATCH, 70), generator=torch.Generator().manual_seed(2))


def test_generation_follows_from_the_seed(model: CausalLM, tokens: Tensor) -> None:
    def generate(seed: int) -> Tensor:
        return model.generate(tokens, 20, temperature=0.9, top_p=0.95, generator=torch.Generator().manual_seed(seed))

    assert generate(0).shape == (BATCH, 20)
    assert torch.equal(generate(0), generate(0))
    assert not torch.equal(generate(0), generate(1))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_temperature_zero_takes_the_most_likely_token(name: str, tokens: Tensor) -> None:
    model = model_of(name)
    drawn = model.generate(tokens, 4, temperature=0)
    for _ in range(4):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(drawn, tokens[:, -4:])


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-46, 5e-324])
def test_very_low_temperatures_take_the_most_likely_token(model: CausalLM, tokens: Tensor, temperature: float) -> None:
    assert torch.equal(model.generate(tokens, 4, temperature=temperature), model.generate(tokens, 4, temperature=0))
    assert torch.equal(sample(torch.tensor([[-3e38, 3e38, -math.inf]]), temperature, 1.0), torch.tensor([1]))


@pytest.mark.parametrize("temperature", [1e30, 1e300, 1.7e308])
def test_very_high_temperatures_draw_uniformly(temperature: float) -> None:
    logits = torch.tensor([[-9.0, 0.0, 5.0, -math.inf]]).expand(3000, 4)
    counts = sample(logits, temperature, 1.0, torch.Generator().manual_seed(0)).bincount(minlength=4) / 3000
    assert torch.allclose(counts, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]), atol=0.05)


def test_a_tiny_top_p_takes_the_most_likely_token() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0]]), 1.0, 5e-324).item() == 1


def test_top_p_drops_unlikely_tokens() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log().expand(2000, 4)
    counts = sample(logits, 1.0, 0.7, torch.Generator().manual_seed(0)).bincount(minlength=4) / 2000
    assert counts[0] == counts[2] == 0
    assert counts[1].item() == pytest.approx(2 / 3, abs=0.05)
    counts = sample(logits, 1.0, 1.0, torch.Generator().manual_seed(0)).bincount(minlength=4) / 2000
    assert torch.allclose(counts, logits[0].exp(), atol=0.05)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nan_logits_raise(model: CausalLM, tokens: Tensor, temperature: float) -> None:
    broken = deepcopy(model)
    with torch.no_grad():
        broken.embeddings.weight[5] = math.nan
    for function, call in (
        ("generate", lambda: broken.generate(tokens * 0 + 5, 3, temperature=temperature)),
        ("stream", lambda: list(stream(broken, [5], 3, temperature=temperature))),
    ):
        with pytest.raises(RangeError, match=f"{function}: logits must be numbers, got NaN. Weights are NaN, or values overflow"):
            call()


def test_values_are_read_once_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only at the end, so that a GPU is not waited for; draws with NaN do not end the process there."""
    monkeypatch.setattr("penstock.models.sampling.reads_values", lambda x: False)
    logits = torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [-math.inf, 0.0]])
    check_logits("generate", logits)
    with pytest.raises(RangeError):
        check_logits("generate", logits, last=True)
    check_logits("generate", logits.to("meta"), last=True)
    assert sample(logits, 1.0, 0.9)[1:].tolist() == [0, 1]
