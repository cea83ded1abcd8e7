"""lm_eval's ``--model hf``: log-likelihoods and generation of a folder."""

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import penstock.models.huggingface  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["rwkv6", "gla", "retnet", "mamba2"])
def test_a_folder_is_a_model_of_lm_eval(name, folders, tokenizer) -> None:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folders[name]), device="cpu", batch_size=2, dtype="float32")
    pairs = [("ab", "cde"), ("abcdef", "x"), ("", "hello")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)])
    plain = AutoModelForCausalLM.from_pretrained(folders[name])
    for (context, rest), (score, _) in zip(pairs, found):
        given = tokenizer(context)["input_ids"] or [256]
        ids = torch.tensor([given + tokenizer(rest)["input_ids"]])
        with torch.no_grad():
            chances = plain(ids).logits[0].log_softmax(-1)
        wanted = sum(float(chances[t - 1, ids[0, t]]) for t in range(len(given), ids.shape[1]))
        assert score == pytest.approx(wanted, rel=1e-4)
    options = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}
    texts = model.generate_until([Instance("generate_until", {}, ("ab", options), 0)])
    ids = torch.tensor([tokenizer("ab")["input_ids"]])
    wanted = plain.generate(ids, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=257)
    assert texts == [tokenizer.decode(wanted[0, 2:], skip_special_tokens=True).split("\n")[0]]
