"""Training by transformers' Trainer: losses, what is saved, schedules, and errors."""

import json
import math
import re

import numpy as np
import pytest
import torch

from penstock import RangeError
from penstock.models import CausalLM, load, rwkv6, save
from penstock.models.tokenizers import Bytes, load_tokenizer
from penstock.training.data import IGNORED, Windows, collate, read
from penstock.training.resuming import after_interruption
from penstock.training.run import train
from penstock.training.schedule import SCHEDULES, rate

pytest.importorskip("transformers")
from tiny_training import TEXT, Stop, Watch, equal, weights


def test_training_lowers_the_loss_and_saves_a_model_that_loads(settings, tmp_path):
    chosen = settings(data__evaluation=str(tmp_path / "b.txt"), training__steps=30, training__tensorboard=True, training__keep=1)
    trained = train(chosen)
    assert trained.steps == 30
    assert trained.loss < 3.5
    assert 0 < trained.evaluation_loss < 5.6
    model = load(trained.folder)
    assert model.config.vocab_size == 256
    assert load_tokenizer(trained.folder).vocab_size == 256
    # every checkpoint is a model, and keep is respected
    checkpoints = sorted(trained.folder.glob("checkpoint-*"))
    assert [one.name for one in checkpoints] == ["checkpoint-30"]
    assert equal(weights(checkpoints[0]), model.state_dict())
    assert list(trained.folder.rglob("events.out.tfevents*"))


@pytest.mark.parametrize("architecture", ["rwkv6", "mamba2"])
def test_a_loss_that_is_no_number_ends_the_training(settings, architecture):
    from dataclasses import replace

    chosen = settings(training__learning_rate=1e30, training__log_every=1, training__warmup=0)
    if architecture == "mamba2":
        chosen = replace(chosen, model={"architecture": "mamba2", "hidden_size": 16, "num_layers": 1, "head_dim": 8, "state_size": 8})
    with pytest.raises(RangeError, match=r"train: the loss must be a number, got (nan|inf) after \d steps"):
        train(chosen)


@pytest.mark.parametrize("packing", [False, True])
def test_the_evaluation_loss_is_the_mean_over_labels(settings, tmp_path, packing):
    """The last batch has fewer samples than the others, and some samples have fewer labels."""
    (tmp_path / "c.txt").write_text("zq.\n\n" * 20 + "the cat sat on the mat and slept. \n\n" * 9 + "@#!" * 45)
    separator = "\n\n" if packing else None
    options = {"data__evaluation": str(tmp_path / "c.txt"), "data__packing": packing, "data__separator": separator}
    trained = train(settings(**options, training__steps=20))
    samples = Windows(read([tmp_path / "c.txt"], Bytes(256), separator), 32, packed=packing)
    assert len(samples) % 4
    batch = collate(list(samples))
    assert samples.counted * len(samples) == pytest.approx(int((batch["labels"] != IGNORED).sum()))
    loss = load(trained.folder).loss(batch["ids"], batch["labels"], batch.get("cu_seqlens"))
    assert trained.evaluation_loss == pytest.approx(loss.item(), rel=1e-5)


def without_labels(tmp_path):
    """Tokens with padding, as of a corpus of rows: each is a document of its own."""
    tokens = np.random.default_rng(0).integers(97, 110, 32 * 40).astype(np.uint16)
    tokens[::50], tokens[32 * 8 : 32 * 24] = 256, 256
    np.save(tmp_path / "padded.npy", tokens)
    np.save(tmp_path / "padding.npy", tokens[32 * 9 : 32 * 20])
    return {"data__tokenizer": "bytes+end", "data__packing": True, "data__train": str(tmp_path / "padded.npy")}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_without_labels_change_no_gradient(settings, tmp_path, accumulate):
    given = {**without_labels(tmp_path), "training__batch_size": 1, "training__accumulate": accumulate, "training__clip": 1.0}
    done = train(settings(**given, training__log_every=1, training__steps=40 // accumulate))
    assert all(x.isfinite().all() for x in weights(done.folder).values())


@pytest.mark.parametrize("name", ["train", "evaluation"])
def test_text_without_any_label_is_named(settings, tmp_path, name):
    given = without_labels(tmp_path)
    with pytest.raises(RangeError, match=rf"train: data\.{name} must be of documents of at least two tokens, got only documents of one\."):
        train(settings(**{**given, f"data__{name}": str(tmp_path / "padding.npy")}))


def test_a_separator_for_tokens_alone_is_refused(settings, tmp_path):
    given = without_labels(tmp_path)
    with pytest.raises(RangeError, match=r"train: data\.separator must be left out if no file is text, got '--'\. Documents of tokens"):
        train(settings(**given, data__separator="--"))
    train(settings(**given, data__separator="\n\n", data__evaluation=str(tmp_path / "b.txt"), training__steps=1))


def test_one_document_may_be_evaluated_on_beside_text_with_separators(settings, tmp_path):
    (tmp_path / "c.txt").write_text(TEXT.replace("\n", " "))
    given = {"data__separator": "\n\n", "training__steps": 1}
    assert math.isfinite(train(settings(**given, data__evaluation=str(tmp_path / "c.txt"))).evaluation_loss)
    with pytest.raises(RangeError, match=r"train: data\.train must be text with the separator '\\n\\n', got .*c\.txt'"):
        train(settings(**given, data__train=str(tmp_path / "c.txt"), data__evaluation=str(tmp_path / "a.txt")))
    tokens = without_labels(tmp_path)
    with pytest.raises(RangeError, match=r"train: data\.evaluation must be text with the separator '\\n\\n', got .*c\.txt'"):
        train(settings(**tokens, data__separator="\n\n", data__evaluation=str(tmp_path / "c.txt")))


def test_text_that_is_too_short_is_named(settings, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    for name in ("train", "evaluation"):
        with pytest.raises(RangeError, match=rf"train: data\.{name} must be at least length \+ 1 = 33 tokens, got 5 tokens"):
            train(settings(**{f"data__{name}": str(tmp_path / "short.txt")}))


def test_equal_seeds_give_equal_models(settings, tmp_path):
    runs = [
        train(settings(training__output=str(tmp_path / str(n)), training__seed=seed, training__steps=2)) for n, seed in enumerate((1, 1, 2))
    ]
    one, same, other = (weights(run.folder) for run in runs)
    assert equal(one, same)
    assert not equal(one, other)


def test_training_goes_on_from_a_checkpoint_of_another_run(settings, tmp_path):
    first = train(settings())
    chosen = settings(training__output=str(tmp_path / "second"), training__steps=1, training__learning_rate=1e-9)
    second = train(parse_with_path(chosen, first.folder))
    for name, value in weights(first.folder).items():
        assert torch.allclose(weights(second.folder)[name], value, atol=1e-6)


def parse_with_path(settings, folder):
    from dataclasses import replace

    return replace(settings, model={"path": str(folder)})


def test_a_published_file_is_trained_on_with_its_tokenizer(settings, tmp_path):
    pytest.importorskip("pyrwkv_tokenizer")
    sizes = {"hidden_size": 8, "num_layers": 1, "intermediate_size": 8, "head_size": 8, "mix_rank": 1, "decay_rank": 1}
    save(CausalLM(rwkv6(vocab_size=65536, **sizes)), tmp_path / "world.pth", "blinkdl")
    before = (tmp_path / "world.pth").read_bytes()
    trained = train(parse_with_path(settings(training__steps=1, data__length=8), tmp_path / "world.pth"))
    assert load(trained.folder).config.vocab_size == 65536
    assert load_tokenizer(trained.folder).encode("the cat") == load_tokenizer(tmp_path / "world.pth").encode("the cat")
    assert (tmp_path / "world.pth").read_bytes() == before


def test_new_models_with_world_tokens_have_the_rows_of_published_ones(settings):
    pytest.importorskip("pyrwkv_tokenizer")
    trained = train(settings(training__steps=1, data__tokenizer="world", data__length=8))
    assert load(trained.folder).config.vocab_size == 65536


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_gradient_checkpointing_and_bfloat16_run(settings, checkpointing):
    trained = train(settings(training__gradient_checkpointing=checkpointing, training__dtype="bfloat16", training__steps=2))
    assert all(value.dtype == torch.float32 for value in weights(trained.folder).values())


@pytest.mark.parametrize("ends", [1, [1], [1, 0], None], ids=str)
def test_a_tokenizer_file_is_kept_with_the_model(settings, tmp_path, ends):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "t": 1, "c": 2}, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    trained = train(settings(data__tokenizer=str(tmp_path / "tokenizer.json"), data__length=8, training__steps=1))
    assert load(trained.folder).config.vocab_size == 3
    for folder in (trained.folder, trained.folder / "checkpoint-1"):
        kept = load_tokenizer(folder)
        assert kept.encode("cat") == [2, 0, 1]
        wanted = load_tokenizer(tmp_path / "tokenizer.json")
        assert (kept.end_of_text, kept.ends) == (wanted.end_of_text, wanted.ends)
        assert kept.ends == {*(ends if isinstance(ends, list) else [ends])} - {None}


def test_an_unknown_tokenizer_is_refused(settings):
    with pytest.raises(
        RangeError, match=r"data\.tokenizer must be bytes, bytes\+end, world or the path of a tokenizer\.json, got 'byte'\. Did"
    ):
        train(settings(data__tokenizer="byte"))


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(settings):
    with pytest.raises(RangeError, match=r"train: model\.vocab_size must be at least the tokenizer's 257, got 256"):
        train(settings(model__vocab_size=256, data__tokenizer="bytes+end"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 0.05, 0.5, 1, 3, 8])
def test_every_step_has_a_learning_rate_above_0(settings, schedule, warmup):
    watch = Watch()
    train(settings(training__schedule=schedule, training__warmup=warmup), callbacks=(watch,))
    steps = math.ceil(warmup * 8) if warmup < 1 else warmup
    assert watch.rates == pytest.approx([1e-2 * rate(step, schedule, steps, 8) for step in range(8)])
    assert min(watch.rates) > 0
    assert max(watch.rates) == pytest.approx(1e-2)
    assert watch.rates[: steps + 1] == sorted(watch.rates[: steps + 1])


@pytest.mark.parametrize(("every", "evaluations"), [(4, 2), (3, 3), (100, 1)])
def test_the_last_evaluation_is_not_made_twice(settings, tmp_path, every, evaluations):
    watch = Watch()
    trained = train(settings(data__evaluation=str(tmp_path / "b.txt"), training__evaluate_every=every), callbacks=(watch,))
    assert watch.evaluations == evaluations
    corpus = read([tmp_path / "b.txt"], Bytes())
    batch = collate(list(Windows(corpus, 32)))
    with torch.no_grad():
        assert trained.evaluation_loss == pytest.approx(load(trained.folder).loss(batch["ids"], batch["labels"]).item(), rel=1e-4)


def test_evaluation_samples_are_the_first(settings, tmp_path):
    trained = train(settings(data__evaluation=str(tmp_path / "b.txt"), training__evaluation_samples=5))
    batch = collate([Windows(read([tmp_path / "b.txt"], Bytes()), 32)[n] for n in range(5)])
    with torch.no_grad():
        assert trained.evaluation_loss == pytest.approx(load(trained.folder).loss(batch["ids"], batch["labels"]).item(), rel=1e-4)


def test_a_run_says_what_it_does(settings, tmp_path):
    said = []
    with pytest.raises(KeyboardInterrupt):
        train(settings(data__evaluation=str(tmp_path / "b.txt"), training__evaluation_samples=5), (Stop(5),), said.append)
    tokens, samples = len(TEXT), (len(TEXT) - 1) // 32
    assert re.fullmatch(r"model: rwkv6, [0-9,]+ parameters, float32 on cpu, 1 thread", said[0])
    assert said[1] == f"training: {tokens:,} tokens, {samples} samples of 32; evaluation: 5 of {samples} samples of {tokens:,} tokens"
    assert said[2] == f"8 steps, each of 128 tokens (4 samples); {32 / samples:.1f} passes over the text"
    assert re.fullmatch(r"[0-9.]+ s a step: the other 5 steps take about [0-9]+ s, without evaluations", said[3])
    assert len(said) == 4
    said.clear()
    train(settings(), (), said.append)
    assert said[2:] == [f"continues from {tmp_path}/run/checkpoint-3", f"steps 4 to 8, {said[3].partition(', ')[2]}", said[4]]


@pytest.mark.parametrize(
    ("changes", "stop", "wanted"),
    [
        ({}, 2, "There is no checkpoint yet (training.save_every is 3 steps): the same command begins again."),
        ({}, 5, "The same command continues from {}/run/checkpoint-3."),
        (
            {"training__resume": False},
            5,
            "The last checkpoint is {}/run/checkpoint-3. The command continues from it with training.resume: true.",
        ),
    ],
)
def test_what_the_command_does_after_an_interruption(settings, tmp_path, changes, stop, wanted):
    with pytest.raises(KeyboardInterrupt):
        train(settings(**changes), callbacks=(Stop(stop),))
    assert after_interruption(settings(**changes).training) == wanted.format(tmp_path)
