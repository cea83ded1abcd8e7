"""``penstock generate``: what it prints, where it ends, and its errors."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import main
from penstock.models import CausalLM, load, rwkv6, save
from penstock.models.streaming import stream
from penstock.models.tokenizers import Bytes

GENERATE = sys.modules["penstock.cli.generate"]
"""The module. Its package has the command under the same name."""


@pytest.fixture(scope="module", params=[256, 257])
def model(request):
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_layers": 1, "intermediate_size": 16, "head_size": 8, "mix_rank": 2, "decay_rank": 2}
    return CausalLM(rwkv6(vocab_size=request.param, **sizes)).eval()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / str(model.config.vocab_size)
    save(model, folder)
    return str(folder)


def run(*words, text=None):
    return CliRunner().invoke(main, ["generate", *words], input=text)


def test_the_text_is_that_of_the_model(model, saved):
    done = run("--model", saved, "--prompt", "Hallo", "--max-tokens", "40", "--seed", "5", "--device", "cpu")
    assert done.exit_code == 0, done.output
    coder = Bytes(model.config.vocab_size)
    options = {"top_p": 0.9, "end": coder.end_of_text, "generator": torch.Generator().manual_seed(5)}
    tokens = list(stream(model, coder.encode("Hallo"), 40, **options))
    assert done.stdout == coder.decode(tokens) + "\n"
    assert f"5 tokens read, {len(tokens)} generated" in done.stderr


def test_tuned_states(saved, model, tmp_path):
    torch.manual_seed(2)
    torch.save({"blocks.0.att.time_state": torch.randn(2, 8, 8) * 5}, tmp_path / "state.pth")
    rest = ["--model", saved, "--prompt", "Hallo", "--tokens", "20", "--temperature", "0", "--device", "cpu"]
    tuned = load(saved, state=tmp_path / "state.pth")
    coder = Bytes(model.config.vocab_size)
    tokens = list(stream(tuned, coder.encode("Hallo"), 20, temperature=0, end=coder.end_of_text))
    done = run(*rest, "--state", str(tmp_path / "state.pth"))
    assert done.exit_code == 0, done.output
    assert done.stdout == coder.decode(tokens) + "\n"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weights(saved, kind):
    rest = ["--model", saved, "--prompt", "Hallo", "--tokens", "20", "--temperature", "0", "--device", "cpu"]
    coder = Bytes(load(saved).config.vocab_size)
    tokens = list(stream(load(saved, quantize=kind), coder.encode("Hallo"), 20, temperature=0, end=coder.end_of_text))
    assert run(*rest, "--quantize", kind).stdout == coder.decode(tokens) + "\n"
    assert "generate: quantize must be one of int8, int4, got 'int1'" in run(*rest, "--quantize", "int1").output


def test_prompts_come_from_files_and_standard_input(saved, tmp_path):
    (tmp_path / "prompt.txt").write_text("Grüße\n")
    rest = ["--model", saved, "--max-tokens", "9", "--temperature", "0", "--device", "cpu"]
    wanted = run(*rest, "--prompt", "Grüße\n").stdout
    assert run(*rest, "--prompt-file", str(tmp_path / "prompt.txt")).stdout == wanted
    assert run(*rest, "--prompt-file", "-", text="Grüße\n").stdout == wanted


def test_generation_ends_at_the_end_of_the_text(model, saved, monkeypatch):
    seen = {}
    monkeypatch.setattr(GENERATE, "stream", lambda model, prompt, count, **options: seen.update(options) or iter([72, 105]))
    done = run("--model", saved, "--prompt", "a")
    assert done.stdout == "Hi\n"
    assert (seen["end"], seen["vocab_size"]) == ({256: set(), 257: {256}}[model.config.vocab_size], model.config.vocab_size)


def test_an_interruption_ends_the_text(saved, monkeypatch):
    def interrupted(*_, **__):
        yield from b"ab\xc3"
        raise KeyboardInterrupt

    monkeypatch.setattr(GENERATE, "stream", interrupted)
    done = run("--model", saved, "--prompt", "a")
    assert (done.exit_code, done.stdout) == (130, "ab\ufffd\n")
    assert "3 generated" in done.stderr


def test_an_empty_prompt_needs_a_token_between_texts(model, saved):
    done = run("--model", saved, "--prompt", "", "--max-tokens", "2")
    if model.config.vocab_size == 257:
        assert done.exit_code == 0, done.output
    else:
        assert done.exit_code == 2
        assert "generate: prompt must be a text of at least one token, got ''" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "generate: prompt must be given by --prompt or by --prompt-file, got neither"),
        (["--prompt", "a", "--prompt-file", "b"], "got both"),
        (["--prompt-file", "nowhere.txt"], "generate: prompt_file must be a text file in UTF-8, got 'nowhere.txt'"),
        (["--prompt", "a", "--device", "tpu"], "generate: device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--prompt", "a", "--dtype", "int8"], "generate: dtype must be one of float16"),
        (["--prompt", "a", "--temperature", "-1"], "generate: temperature must be a finite number of at least 0"),
        (["--prompt", "a", "--seed", "-1"], "generate: seed must be from 0"),
        (
            ["--prompt", "a", "--tokenizer", "nowhere"],
            "got 'nowhere', which does not exist. Pass a tokenizer.json, or a checkpoint with its",
        ),
        (["--prompt", "a", "--model", "nowhere"], "generate: model must be an existing file or folder, got 'nowhere'"),
    ],
)
def test_wrong_options_give_one_message(saved, words, message):
    done = run("--model", saved, *words)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_tokens_is_another_name_of_max_tokens(saved):
    rest = ["--model", saved, "--prompt", "a", "--temperature", "0", "--device", "cpu"]
    assert run(*rest, "--tokens", "9").stdout == run(*rest, "--max-tokens", "9").stdout
