"""The classes for transformers over the ranks of a process group."""

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from ranks import spawned
from sampling import slow
from slices import cuts, transformers_alike

import penstock as ps

pytest.importorskip("transformers")


@pytest.mark.parametrize("names", [("rwkv6", "mamba2", "hybrid", "retnet"), *slow(tuple(ARCHITECTURES))])
def test_ranks_equal_one_process(names):
    each = 3 if len(names) == len(ARCHITECTURES) else 1
    every = cuts(3, each * len(names), seed=2)
    spawned(transformers_alike, 3, [(name, cut) for n, name in enumerate(names) for cut in every[n * each : (n + 1) * each]])


def test_what_calls_with_a_context_refuse(alone):
    from penstock.models.huggingface import PenstockForCausalLM

    model, ids = PenstockForCausalLM.of(model_of("rwkv6")), torch.randint(13, (2, 9))
    context, mask = ps.distributed.ContextParallel(alone, tokens=9), torch.ones(2, 9)
    model(ids, attention_mask=mask, labels=ids, context=context)
    mask[0, 0] = 0
    with pytest.raises(ps.RangeError, match="attention_mask must be 1 for all tokens with a context, got padding"):
        model(ids, attention_mask=mask, context=context)
    with pytest.raises(ps.RangeError, match="position_ids must be those of one sequence a row with a context, got packed sequences"):
        model.model(ids, position_ids=torch.arange(9).expand(2, 9) % 5, context=context)
    with pytest.raises(ps.ShapeError, match=r"ids must be of the context's 9 tokens on rank 0, got 8\. Make a context for each batch"):
        model(ids[:, :8], context=context)
