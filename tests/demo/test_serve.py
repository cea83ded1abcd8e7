"""The trained model behind HTTP."""

import pytest
import torch

from penstock.demo import serve
from penstock.errors import MissingExtra, PenstockError
from penstock.models import CausalLM, rwkv6, save


def test_a_server_of_its_own_answers_one_request(tmp_path):
    torch.manual_seed(0)
    model = CausalLM(rwkv6(vocab_size=256, hidden_size=32, num_layers=1, head_size=8))
    save(model, tmp_path / "bytes.pth", format="blinkdl")
    answer = serve.ask(tmp_path / "bytes.pth", "abc", 5)
    assert (answer.prompt_tokens, answer.completion_tokens) == (3, 5)
    assert answer.url.startswith("http://127.0.0.1:")


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(PenstockError, match=r"demo: the server did not start. It said: .*nothing.pth"):
        serve.ask(tmp_path / "nothing.pth", "abc")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"penstock-lm\[demo\]"):
        serve.ask(tmp_path / "a.pth", "abc")
