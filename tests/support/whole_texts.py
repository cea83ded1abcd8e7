"""Log probabilities that an engine finds, against one call of the model for the whole text."""

import pytest
import torch


@torch.no_grad()
def check_logprobs(model, prompt, params, result):
    """Log probabilities of prompt and completions are those of the whole text in one call of the model."""
    for one in result.completions:
        tokens = [*prompt, *one.tokens]
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
        for wanted, found, begin in ((params.prompt_logprobs, result.prompt_logprobs, 0), (params.logprobs, one.logprobs, len(prompt))):
            if wanted is None:
                assert not found
                continue
            assert [scored and scored.token for scored in found] == ([None, *tokens[1 : len(prompt)]] if begin == 0 else one.tokens)
            for place, scored in enumerate(found[begin == 0 :], begin or 1):
                assert scored.logprob == pytest.approx(float(scores[place - 1, scored.token]), abs=1e-3)
                assert [x for _, x in scored.top] == pytest.approx(scores[place - 1].topk(wanted)[0].tolist(), abs=1e-3)
