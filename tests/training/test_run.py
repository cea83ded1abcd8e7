"""Training by transformers' Trainer: losses, checkpoints, resuming, and what is saved."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sampling import every

from penstock import RangeError
from penstock.models import CausalLM, load, rwkv6, save
from penstock.models.tokenizers import Bytes, load_tokenizer
from penstock.training.data import IGNORED, Windows, collate, read
from penstock.training.resuming import after_interruption
from penstock.training.run import train
from penstock.training.schedule import SCHEDULES, rate
from penstock.training.settings import parse

pytest.importorskip("transformers")

TEXT = "the cat sat on the mat. \n\n" * 80


@pytest.fixture
def settings(tmp_path):
    """Make settings of a tiny training, with changes by ``section__key``."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[::-1])

    def make(**changes):
        content = {
            "model": {"architecture": "rwkv6", "hidden_size": 16, "num_layers": 1, "head_size": 8, "mix_rank": 2, "decay_rank": 2},
            "data": {"train": str(tmp_path / "a.txt"), "length": 32},
            "training": {
                "output": str(tmp_path / "run"), "steps": 8, "batch_size": 4, "learning_rate": 1e-2, "log_every": 2, "save_every": 3,
                "tensorboard": False, "device": "cpu",
            },
        }  # fmt: skip
        for name, value in changes.items():
            section, key = name.split("__")
            content[section][key] = value
        return parse(content)

    return make


class Stop:
    """A callback that raises after this many steps."""

    def __new__(cls, steps):
        from transformers import TrainerCallback

        class Stopping(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == steps:
                    raise KeyboardInterrupt

        return Stopping()


def weights(folder):
    return load(Path(folder)).state_dict()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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


@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(settings, tmp_path, packing):
    common = {"data__packing": packing, "data__separator": "\n\n" if packing else None, "training__accumulate": 2}
    whole = train(settings(**common, training__output=str(tmp_path / "whole")))
    with pytest.raises(KeyboardInterrupt):
        train(settings(**common), callbacks=(Stop(5),))
    assert [one.name for one in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    resumed = train(settings(**common))
    assert resumed.steps == whole.steps == 8
    assert equal(weights(resumed.folder), weights(whole.folder))
    assert equal(weights(train(settings(**common)).folder), weights(whole.folder))  # nothing is left to do


@pytest.mark.parametrize("steps", [3, 2])
def test_a_run_without_steps_left_changes_nothing(settings, tmp_path, steps):
    """The Trainer itself would take one step more than it has."""
    common = {"training__schedule": "constant", "data__evaluation": str(tmp_path / "b.txt")}
    done = train(settings(**common, training__steps=3))
    before = weights(done.folder)
    again = train(settings(**common, training__steps=steps))
    assert (again.steps, again.loss, again.evaluation_loss) == (3, done.loss, pytest.approx(done.evaluation_loss))
    assert equal(weights(again.folder), before)
    assert train(settings(**common, training__steps=4)).steps == 4


def test_checkpoints_that_are_not_whole(settings, tmp_path):
    """One whose writing was interrupted is left out; without the optimizer's state there is nothing to go on from."""
    whole = train(settings(training__output=str(tmp_path / "whole"), training__steps=5))
    train(settings(training__steps=5, training__save_every=3))
    (tmp_path / "run" / "checkpoint-5" / "trainer_state.json").unlink()
    resumed = train(settings(training__steps=5))
    assert equal(weights(resumed.folder), weights(whole.folder))
    (tmp_path / "run" / "checkpoint-5" / "optimizer.pt").unlink()
    with pytest.raises(RangeError, match=r"must be a folder of whole checkpoints, got '.*checkpoint-5' without optimizer.pt\. Remove this"):
        train(settings(training__steps=7))


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "text": lambda content: b"no checkpoint",
    "of another kind": lambda content: b"[1]",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "config.json", "model.safetensors"]
)
def test_a_damaged_file_of_a_checkpoint_is_named(settings, tmp_path, name, damage):
    train(settings(training__steps=4))
    file = tmp_path / "run" / "checkpoint-4" / name
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(RangeError) as caught:
        train(settings(training__steps=5))
    message = str(caught.value)
    place = file.parent if name in ("config.json", "model.safetensors") else file
    assert message.startswith(f"train: training.output must be a folder of whole checkpoints, got {str(place)!r} (")
    assert name in message
    assert message.endswith(f"). Remove this checkpoint: the same command then continues from {tmp_path}/run/checkpoint-3.")
    assert len(message.splitlines()) == 1
    shutil.rmtree(file.parent)
    assert train(settings(training__steps=4)).steps == 4


MISSING = {
    name: (name,) for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json", "model.safetensors")
} | {"several": ("optimizer.pt", "rng_state.pth")}  # fmt: skip


@pytest.mark.parametrize("names", MISSING.values(), ids=MISSING)
def test_a_missing_file_of_a_checkpoint_is_named(settings, tmp_path, names):
    """But trainer_state.json: the Trainer writes it last, and a checkpoint without it is one that is not whole."""
    train(settings(training__steps=4))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert {one.name for one in checkpoint.iterdir()} - {"training_args.bin"} == {"trainer_state.json"}.union(*MISSING.values())
    for name in names:
        (checkpoint / name).unlink()
    with pytest.raises(RangeError) as caught:
        train(settings(training__steps=5))
    message = str(caught.value)
    assert message.startswith("train: training.output must be a folder of whole checkpoints, got ")
    assert all(name in message for name in names)
    assert message.endswith(f"Remove this checkpoint: the same command then continues from {tmp_path}/run/checkpoint-3.")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_state_of_another_training_is_named(settings, tmp_path, name):
    train(settings(training__steps=2))
    torch.save({"state": {}, "param_groups": []}, tmp_path / "run" / "checkpoint-2" / name)
    with pytest.raises(RangeError, match=rf"checkpoint-2/{name}' \(.*\)\. Remove this checkpoint: the same command then begins again\."):
        train(settings(training__steps=3))


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


@pytest.mark.parametrize("epochs", [0.1, 0.5, 1, 1.3])
def test_a_run_without_epochs_left_changes_nothing(settings, epochs):
    common = {"training__steps": None, "training__epochs": epochs, "training__accumulate": 2}
    done = train(settings(**common))
    before = weights(done.folder)
    again = train(settings(**common))
    assert again.steps == done.steps > 0
    assert equal(weights(again.folder), before)


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


def test_checkpoints_of_another_model_are_refused(settings):
    train(settings(training__steps=3))
    with pytest.raises(RangeError, match=r"train: training\.output must be a folder whose checkpoints are of the same model"):
        train(settings(model__num_layers=2))
    with pytest.raises(RangeError, match=r"training\.output must be a folder without checkpoints if training\.resume is false"):
        train(settings(training__resume=False))


def test_an_unknown_tokenizer_is_refused(settings):
    with pytest.raises(
        RangeError, match=r"data\.tokenizer must be bytes, bytes\+end, world or the path of a tokenizer\.json, got 'byte'\. Did"
    ):
        train(settings(data__tokenizer="byte"))


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(settings):
    with pytest.raises(RangeError, match=r"train: model\.vocab_size must be at least the tokenizer's 257, got 256"):
        train(settings(model__vocab_size=256, data__tokenizer="bytes+end"))


class Watch:
    """A callback that keeps the learning rate of each step, and counts evaluations."""

    def __new__(cls):
        from transformers import TrainerCallback

        class Watching(TrainerCallback):
            def __init__(self):
                self.rates, self.evaluations = [], 0

            def on_step_begin(self, args, state, control, optimizer=None, **_):
                self.rates.append(optimizer.param_groups[0]["lr"])

            def on_evaluate(self, args, state, control, **_):
                self.evaluations += 1

        return Watching()


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


@pytest.mark.parametrize("schedule", every(3, SCHEDULES))
def test_a_resumed_run_has_the_learning_rates_of_a_whole_one(settings, tmp_path, schedule):
    whole, before, after = Watch(), Watch(), Watch()
    train(settings(training__schedule=schedule, training__output=str(tmp_path / "whole")), callbacks=(whole,))
    with pytest.raises(KeyboardInterrupt):
        train(settings(training__schedule=schedule), callbacks=(before, Stop(5)))
    train(settings(training__schedule=schedule), callbacks=(after,))
    assert before.rates[:3] + after.rates == pytest.approx(whole.rates)


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


class Look:
    """A callback that keeps the settings of the optimizer in each step, and the steps of logs and checkpoints."""

    def __new__(cls):
        from transformers import TrainerCallback

        class Looking(TrainerCallback):
            def __init__(self):
                self.groups, self.logged, self.saved = [], [], []

            def on_step_begin(self, args, state, control, optimizer=None, **_):
                self.groups.append([(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups])

            def on_log(self, args, state, control, logs=None, **_):
                self.logged += [state.global_step] * ("loss" in logs)

            def on_save(self, args, state, control, **_):
                self.saved.append(state.global_step)

        return Looking()


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 3e-3, "betas": [0.5, 0.6], "weight_decay": 0.2},
        {"schedule": "constant", "warmup": 0.5},
        {"steps": 12, "save_every": 2, "log_every": 1, "learning_rate": 1e-4},
    ],
)
def test_a_resumed_run_has_the_settings_of_its_file(settings, tmp_path, changes):
    """From its first step on, as if all steps had them."""
    given = {f"training__{name}": value for name, value in changes.items()}
    whole, resumed = Look(), Look()
    train(settings(**given, training__output=str(tmp_path / "whole")), callbacks=(whole,))
    with pytest.raises(KeyboardInterrupt):
        train(settings(), callbacks=(Stop(5),))
    train(settings(**given), callbacks=(resumed,))
    assert resumed.groups == whole.groups[3:]
    assert resumed.logged == [step for step in whole.logged if step > 3]
    assert resumed.saved == [step for step in whole.saved if step > 3]
