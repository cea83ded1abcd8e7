"""Requests of lm_eval, and the registration with a stand-in of its base class."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tokenizer_files import tokenizer_of

from penstock import RangeError
from penstock.errors import MissingExtra
from penstock.models import CausalLM, gla, load, rwkv6, save
from penstock.models.tokenizers import Bytes, ends_of
from penstock.training.lm_eval import Answers, main, register


def asked(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "num_layers": 2, "intermediate_size": 16, "head_size": 8, "mix_rank": 2, "decay_rank": 2}
    model = CausalLM(rwkv6(vocab_size=257, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module", params=[256, 257])
def answers(model, request):
    return Answers(model, Bytes(request.param))


def judged(model, tokens, first):
    """log p of tokens from ``first`` on, and whether they are the most likely ones, from the logits of the whole."""
    logits = model(torch.tensor([tokens])).logits[0].double()
    log_p = [logits[t - 1].log_softmax(-1)[tokens[t]].item() for t in range(max(first, 1), len(tokens))]
    greedy = all(logits[t - 1].argmax() == tokens[t] for t in range(max(first, 1), len(tokens)))
    return sum(log_p), greedy


def test_continuations_are_scored_after_their_context(model, answers):
    requests = [("The sea", " is wide"), ("a", "b"), ("The sea ", "is"), ("", "alone"), ("long " * 30, "x" * 9)]
    found = answers.loglikelihood([asked(*request) for request in requests])
    for (context, continuation), (log_p, greedy) in zip(requests, found):
        before, after = list(context.rstrip().encode()) or answers.begin, list(continuation.encode())
        after = list(context[len(context.rstrip()) :].encode()) + after
        wanted, most_likely = judged(model, before + after, len(before))
        assert log_p == pytest.approx(wanted, rel=1e-4)
        assert greedy == most_likely


def test_a_continuation_within_a_token_gets_no_space_before_it(tmp_path):
    tokenizer = tokenizer_of("byte fallback", tmp_path)
    model = CausalLM(gla(vocab_size=tokenizer.vocab_size, hidden_size=8, num_layers=1, num_heads=1))
    before, whole = tokenizer.encode("t"), tokenizer.encode("the")
    assert whole[: len(before)] != before
    ((log_p, _),) = Answers(model, tokenizer).loglikelihood([asked("t", "he")])
    tokens = [*before, *(tokenizer.encode("a" + letter)[-1] for letter in "he")]
    assert log_p == pytest.approx(judged(model, tokens, len(before))[0], rel=1e-4)


def test_the_most_likely_continuation_is_found_out(model, answers):
    (text,) = answers.generate_until([asked("ab", {"until": [], "max_gen_toks": 1})])
    tokens = torch.tensor([list(b"ab")])
    best = int(model(tokens).logits[0, -1, : answers.coder.vocab_size].argmax())
    assert text == answers.coder.decode([best])
    letters = [chr(code) for code in range(128)]
    found = answers.loglikelihood([asked("ab", letter) for letter in letters])
    assert [greedy for _, greedy in found] == [ord(letter) == int(model(tokens).logits[0, -1].argmax()) for letter in letters]


def test_texts_are_scored_whole(model, answers):
    texts = ["one", "another text", "é"]
    found = answers.loglikelihood_rolling([asked(text) for text in texts])
    for text, log_p in zip(texts, found):
        assert log_p == pytest.approx(judged(model, answers.begin + list(text.encode()), 0)[0], rel=1e-4)


def test_generation_stops_at_the_first_of_the_strings(answers, monkeypatch):
    taken = []

    def tokens(*_, **options):
        for token in b"one two three":
            taken.append(token)
            yield token

    monkeypatch.setattr("penstock.training.lm_eval.stream", tokens)
    assert answers.generate_until([asked("a", {"until": ["three", " t"]})]) == ["one"]
    assert bytes(taken) == b"one t"
    assert answers.generate_until([asked("a", {"until": "four"})]) == ["one two three"]
    with pytest.raises(RangeError, match=r"generate_until: options must be among until, .*, got 'beams'"):
        answers.generate_until([asked("a", {"beams": 2})])


def test_generation_is_greedy_unless_sampling_is_asked_for(answers, monkeypatch):
    seen = []
    monkeypatch.setattr("penstock.training.lm_eval.stream", lambda *args, **options: seen.append((args[2], options)) or iter(()))
    for options in ({}, {"do_sample": False, "temperature": 0.7}, {"temperature": 0.7, "max_gen_toks": 3}, {"do_sample": True}):
        answers.generate_until([asked("a", options)])
    assert [options["temperature"] for _, options in seen] == [0, 0, 0.7, 1]
    assert [count for count, _ in seen] == [256, 256, 3, 256]


def test_generation_stops_at_special_tokens_among_the_strings(answers, monkeypatch):
    """They have no text."""
    seen = []
    monkeypatch.setattr(answers.coder, "special_tokens", {"<end>": 7, "<other>": 8}, raising=False)
    monkeypatch.setattr("penstock.training.lm_eval.stream", lambda *_, end, **options: seen.append(end) or iter(()))
    for until in "<end>", ["a", "<end>"], []:
        answers.generate_until([asked("a", {"until": until})])
    ends = ends_of(answers.coder)
    assert seen == [ends | {7}, ends | {7}, ends]


def test_the_model_is_registered(model, tmp_path, monkeypatch):
    models = {}
    api, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    api.LM = type("LM", (), {})
    registry.register_model = lambda name: lambda kind: models.setdefault(name, kind)
    for name, module in (
        ("lm_eval", ModuleType("lm_eval")),
        ("lm_eval.api", ModuleType("a")),
        (api.__name__, api),
        (registry.__name__, registry),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    assert register() is models["penstock"]
    save(model, tmp_path)
    made = models["penstock"](path=str(tmp_path), device="cpu", dtype="float64", batch_size=1)
    assert isinstance(made, api.LM)
    assert made.language_model.embeddings.weight.dtype == torch.float64
    assert made.loglikelihood_rolling([asked("text")])[0] < 0


def test_without_lm_eval_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtra, match="register: lm_eval must be installed, got none"):
        register()


@pytest.mark.parametrize("words", [["--help"], ["--model", "penstock", "--model_args", "path=nowhere", "--tasks", "lambada_openai"]])
def test_the_command_without_lm_eval_says_what_to_install(monkeypatch, capsys, words):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "register: lm_eval must be installed, got none. Run pip install lm_eval.\n"


def test_errors_of_the_model_are_messages(monkeypatch, capsys):
    package = ModuleType("lm_eval.__main__")
    package.cli_evaluate = lambda: load("nowhere")
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", package)
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setattr("penstock.training.lm_eval.register", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "load: path must be an existing file or folder, got 'nowhere'" in capsys.readouterr().err
