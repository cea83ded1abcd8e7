"""The engine on a GPU: overlap and CUDA graphs give the tokens of plain steps."""

import pytest
import torch
from architectures import model_of

from penstock.engine import Engine, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["rwkv6", "rwkv5.2", "mamba2", "gla", "retnet", "linear"])
def test_tokens_do_not_depend_on_overlap_graphs_and_other_requests(name):
    model = model_of(name).cuda()
    prompts = [[n % 13] * (20 * n + 1) for n in range(9)]
    params = [SamplingParams(max_tokens=10 * n + 1, seed=n) for n in range(9)]
    plain = Engine(model, slots=1, token_budget=200, cache_bytes=0, overlap=False, cuda_graphs=False)
    wanted = [plain.generate([prompt], some)[0].tokens for prompt, some in zip(prompts, params)]
    engine = Engine(model, slots=5, token_budget=200)
    for _ in range(2):  # the second time with graphs that exist, and with the cache
        assert [result.tokens for result in engine.generate(prompts, params)] == wanted
    engine.check_integrity()
