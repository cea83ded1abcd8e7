"""``penstock eval``: what it prints and writes, and its errors."""

import json

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import main
from penstock.models import CausalLM, gla, save
from penstock.training import synthetic

SMALL = ["--pairs", "1", "--length", "6", "--vocab-size", "8", "--hidden-size", "16", "--num-layers", "1", "--seconds", "0.001"]


def run(*words):
    return CliRunner().invoke(main, ["eval", *words])


def test_recall_is_trained_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHECKED", 8)
    done = run("--task", "mqar", "--architecture", "rwkv6", *SMALL, "--device", "cpu", "--json", str(tmp_path / "deep" / "a.json"))
    assert done.exit_code == 0, done.output
    assert "rwkv6, " in done.output
    assert "% right" in done.output
    content = json.loads((tmp_path / "deep" / "a.json").read_text())
    assert content["curve"][-1]["accuracy"] == content["accuracy"]
    assert (content["task"], content["architecture"], content["pairs"], content["machine"]["torch"]) == (
        "mqar",
        "rwkv6",
        1,
        torch.__version__,
    )


def test_reversal_is_trained_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHECKED", 8)
    words = ["--digits", "3", "--hidden-size", "16", "--num-layers", "1", "--seconds", "0.001", "--device", "cpu"]
    done = run("--task", "reversal", "--architecture", "rwkv7", *words, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    assert "rwkv7, " in done.output
    content = json.loads((tmp_path / "a.json").read_text())
    assert (content["task"], content["digits"], content["curve"][-1]["accuracy"]) == ("reversal", 3, content["accuracy"])


def test_perplexity_is_printed_and_written(tmp_path):
    torch.manual_seed(0)
    save(CausalLM(gla(vocab_size=257, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)), tmp_path / "model")
    (tmp_path / "a.txt").write_text("Größe " * 50)
    words = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "a.txt"), "--device", "cpu"]
    done = run("--task", "perplexity", *words, "--window", "64", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["tokens"] == content["bytes"] == 400
    assert content["nats_per_byte"] == pytest.approx(5.55, abs=0.1)
    assert f"{content['nats_per_byte']:.4f} nats a byte" in done.output
    assert "400 tokens of 400 bytes" in done.output


def test_perplexities_of_quantized_weights(tmp_path):
    """Alone, and compared with those of the checkpoint."""
    torch.manual_seed(0)
    save(CausalLM(gla(vocab_size=257, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)), tmp_path / "model")
    (tmp_path / "a.txt").write_text("Größe " * 50)
    words = ["--task", "perplexity", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "a.txt"), "--device", "cpu"]
    kinds = [word for kind in ("none", "int8", "int4") for word in ("--quantize", kind)]
    done = run(*words, *kinds, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "a.json").read_text())
    assert list(content["quantize"]) == ["none", "int8", "int4"]
    assert content["perplexity"] == content["quantize"]["none"]["perplexity"]
    assert 0 < abs(content["quantize"]["int8"]["nats"] - content["nats"]) < abs(content["quantize"]["int4"]["nats"] - content["nats"])
    assert "perplexity of int4: " in done.output
    alone = run(*words, "--quantize", "int8")
    assert f"int8: {content['quantize']['int8']['nats_per_byte']:.4f} nats a byte" in alone.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "glue"], "eval: task must be one of mqar, reversal, perplexity, got 'glue'"),
        (["--task", "perplexity"], "eval: model must be given for perplexity, got none. Add --model.\neval: text must be given for"),
        (["--task", "perplexity", "--model", "a"], "eval: text must be given for perplexity, got none. Add --text."),
        (["--task", "perplexity", "--model", "a", "--text", "nowhere"], "eval: text must be a text file in UTF-8, got 'nowhere'"),
        (["--task", "perplexity", "--model", "a", "--text", "b.jsonl"], "eval: text must be one text, got documents in lines of JSON"),
        (["--task", "perplexity", "--model", "a", "--text", "b.JSONL"], "eval: text must be one text, got documents in lines of JSON"),
        (["--task", "perplexity", "--model", "a", "--text", "b", "--pairs", "3"], "eval: pairs must be given for mqar only"),
        (["--task", "mqar", "--window", "3"], "eval: window must be given for perplexity only, got --task mqar"),
        (["--task", "reversal", "--pairs", "3"], "eval: pairs must be given for mqar only, got --task reversal"),
        (["--task", "perplexity", "--model", "a", "--text", "b", "--seed", "3"], "eval: seed must be given for mqar and reversal only"),
        (["--task", "reversal", "--digits", "0"], "reversal: digits must be at least fewest = 1, got 0"),
        (["--task", "mqar", "--architecture", "lstm"], "eval: architecture must be one of delta_net, gated_deltanet, gla, "),
        (["--task", "mqar", "--pairs", "20"], "mqar: length must be an even number of at least 4 * pairs = 80, got 64"),
        (["--task", "mqar", "--seconds", "0"], "eval: seconds must be a finite number above 0"),
        (["--task", "mqar", "--device", "tpu"], "eval: device must be cpu, cuda or cuda:N"),
        (["--task", "mqar", "--quantize", "int8"], "eval: quantize must be given for perplexity only, got --task mqar"),
        (["--task", "perplexity", "--quantize", "int2"], "eval: quantize must be one of none, int8, int4, got 'int2'"),
        (["--task", "mqar", "--json", "."], "eval: --json must be a file that can be written"),
    ],
)
def test_wrong_options_give_one_message(words, message):
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert message in done.output
