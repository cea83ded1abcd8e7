"""Log-likelihoods of texts: against logits of each text alone, in any grouping and any windows."""

import copy
import math

import pytest
import torch

from penstock import RangeError
from penstock.models import CausalLM, gla, rwkv6
from penstock.models.tokenizers import Bytes
from penstock.training.scoring import Perplexity, perplexity, score

SIZES = {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "intermediate_size": 16}


@pytest.fixture(scope="module", params=["rwkv6", "gla"])
def model(request):
    torch.manual_seed(2)
    config = rwkv6(**SIZES, head_size=8, mix_rank=2, decay_rank=2) if request.param == "rwkv6" else gla(**SIZES, num_heads=2)
    model = CausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def alone(model, tokens):
    """The judge: log probabilities and most likely tokens from the logits of one sequence."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    following = torch.tensor(tokens[1:])
    return logits.log_softmax(-1).gather(-1, following[:, None])[:, 0], logits.argmax(-1) == following


@pytest.mark.parametrize("budget", [4, 16, 1000])
def test_scores_do_not_depend_on_groups_and_windows(model, budget):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(257, (length,), generator=generator).tolist() for length in (7, 1, 30, 2, 5, 12)]
    found = score(model, sequences, budget)
    assert [len(one.log_p) for one in found] == [6, 0, 29, 1, 4, 11]
    for one, tokens in zip(found, sequences):
        if len(tokens) > 1:
            log_p, greedy = alone(model, tokens)
            assert torch.allclose(one.log_p, log_p, rtol=1e-4, atol=1e-5)
            assert torch.equal(one.greedy, greedy)


def test_perplexity_counts_every_token_once(model):
    text = "Ein Text über Wörter. " * 3
    tokens = list(text.encode())
    for window in (1, 10, 1000):
        with_end = perplexity(model, Bytes(257), text, window)
        assert (with_end.tokens, with_end.bytes) == (len(tokens), len(tokens))
        assert with_end.nats == pytest.approx(-alone(model, [256, *tokens])[0].sum().item(), rel=1e-4)
        without = perplexity(model, Bytes(), text, window)
        assert (without.tokens, without.bytes) == (len(tokens) - 1, len(tokens) - 1)
        assert without.nats_per_byte == without.nats_per_token == pytest.approx(-alone(model, tokens)[0].mean().item(), rel=1e-4)
        assert without.perplexity == pytest.approx(math.exp(without.nats_per_token))


def test_a_text_without_predictions_is_refused(model):
    with pytest.raises(RangeError, match="perplexity: text must be at least two tokens, got 1"):
        perplexity(model, Bytes(), "a")


def test_losses_that_are_no_numbers_are_refused(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.head.weight[0] = math.nan
    with pytest.raises(RangeError, match=r"perplexity: losses must be numbers, got NaN. Weights are NaN, or values overflow"):
        perplexity(broken, Bytes(257), "some text")
    assert Perplexity(tokens=1, bytes=1, nats=800.0).perplexity == math.inf
