"""Configurations refuse values of wrong types and sizes before anything is built."""

import inspect
import math
from dataclasses import fields, replace

import pytest
import torch

from penstock.errors import InvalidArgument
from penstock.layers import CONFIGS, GLAConfig, Mamba2Config, RetentionConfig, RWKV6Config, SoftmaxAttentionConfig, SwiGLUConfig
from penstock.layers.keywords import suggestion
from penstock.models import CausalLM, Config, gla, hybrid, linear, mamba2, retnet, rwkv5, rwkv6
from penstock.training.settings import ARCHITECTURES

SIZES = {"vocab_size": 9, "hidden_size": 16, "num_layers": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gla(**SIZES | {"hidden_size": "16"}), "Config: hidden_size must be a whole number, got '16' of type str"),
        (lambda: rwkv5(**SIZES | {"hidden_size": None}), "Config: hidden_size must be a whole number, got None"),
        (lambda: rwkv6(**SIZES, mix_rank=-3), "RWKV6Config: mix_rank must be a whole number of at least 1, got -3"),
        (lambda: gla(**SIZES, num_heads=0), "GLAConfig: num_heads must be a whole number of at least 1, got 0"),
        (lambda: gla(**SIZES, num_heads=2.0), "GLAConfig: num_heads must be a whole number, got 2.0 of type float"),
        (lambda: gla(**SIZES, intermediate_size=0), "SwiGLUConfig: intermediate_size must be a whole number of at least 1"),
        (lambda: retnet(**SIZES, num_kv_heads=0), "RetentionConfig: num_kv_heads must be a whole number of at least 1"),
        (lambda: linear(**SIZES, normalize="no"), "LinearAttentionConfig: normalize must be True or False, got 'no'"),
        (lambda: mamba2(**SIZES, head_dim=0), "mamba2: head_dim must be a whole number of at least 1, got 0"),
        (lambda: mamba2(**SIZES), "mamba2: head_dim must be a divisor of 2 . hidden_size = 32, got 64"),
        (lambda: mamba2(**SIZES, head_dim=8, tie_embeddings="no"), "Config: tie_embeddings must be True or False, got 'no'"),
        (lambda: Config(3, 4, 2**70, GLAConfig(2)), "Config: num_layers must be a whole number below 2.63"),
        (lambda: Config(3, 4, 1, GLAConfig(2), norm_eps=-1.0), "Config: norm_eps must be a finite number of at least 0, got -1.0"),
        (lambda: GLAConfig(expand_k=float("nan")), "GLAConfig: expand_k must be a finite number of at least 0, got nan"),
        (lambda: RWKV6Config(norm_eps=None), "RWKV6Config: norm_eps must be a number, got None"),
        (lambda: SwiGLUConfig("3"), "SwiGLUConfig: intermediate_size must be a whole number, got '3'"),
        (lambda: hybrid(None, SoftmaxAttentionConfig(2), [0]), "hybrid: config must be a Config, got None"),
        (lambda: hybrid(gla(**SIZES), SoftmaxAttentionConfig(2), 3), "hybrid: layers must be from 0 to 0, got 3"),
        (lambda: hybrid(gla(**SIZES), SoftmaxAttentionConfig(2), [True]), "hybrid: layers must be whole numbers, got True of type bool"),
        (lambda: Config.from_dict(None), "Config.from_dict: values must be a mapping, as to_dict returns, got None"),
        (lambda: Mamba2Config(4, time_step_limit="x"), "Mamba2Config: time_step_limit must be two numbers"),
        (lambda: Mamba2Config(4, time_step_limit=(0, 1e308)), "Mamba2Config: time_step_limit must be two numbers of float32"),
        (lambda: Mamba2Config(4, time_step_limit=(math.inf, math.inf)), "Mamba2Config: time_step_limit must be two numbers of float32"),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_rotary_bases_may_be_large_whole_numbers():
    model = CausalLM(Config(11, 16, 1, RetentionConfig(2, rope_theta=10**30)))
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("given", "meant"),
    [("num_hidden_layers", "num_layers"), ("n_layer", "num_layers"), ("d_model", "hidden_size"), ("vocabsize", "vocab_size")],
)
def test_unknown_keywords_of_configuration_functions_name_the_nearest_one(name, given, meant):
    sizes = {key: value for key, value in SIZES.items() if key != meant}
    with pytest.raises(InvalidArgument) as error:
        ARCHITECTURES[name](**sizes, **{given: 3})
    known = ", ".join(inspect.signature(ARCHITECTURES[name]).parameters)
    wanted = f"{name}: arguments must be among {known}, got {given}. Did you mean {meant}?\n{name}: {meant} must be given, got none."
    assert str(error.value).startswith(wanted)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_configuration_functions_take_names_only(name):
    with pytest.raises(InvalidArgument, match=f"{name}: arguments must be given by name, got 3 without. Names are vocab_size, "):
        ARCHITECTURES[name](9, 16, 1)


def test_names_of_the_arguments_of_hybrid_are_checked():
    with pytest.raises(
        InvalidArgument, match=r"hybrid: arguments must be among config, attention, layers, got layer. Did you mean layers\?"
    ):
        hybrid(gla(**SIZES), SoftmaxAttentionConfig(2), layer=[0])
    with pytest.raises(InvalidArgument, match="hybrid: arguments must be given by name after the first 3, got 4 without"):
        hybrid(gla(**SIZES), SoftmaxAttentionConfig(2), [0], 4)
    with pytest.raises(InvalidArgument, match="hybrid: layers must be given, got none"):
        hybrid(gla(**SIZES), attention=SoftmaxAttentionConfig(2))


@pytest.mark.parametrize("config", [Config, *(one for one in CONFIGS.values() if one.__module__.startswith("penstock."))])
def test_unknown_fields_of_configurations_name_the_nearest_one(config):
    field = fields(config)[0].name
    with pytest.raises(InvalidArgument, match=rf"{config.__name__}: arguments must be among .*got {field}x. Did you mean {field}\?"):
        config(**{f"{field}x": 1})


@pytest.mark.parametrize(
    ("given", "known", "meant"),
    [
        ("head_size", ["num_heads", "head_dim"], "head_dim"),
        ("head_dim", ["num_heads", "head_size"], "head_size"),
        ("n_head", ["num_heads"], "num_heads"),
        ("d_state", ["state_size", "hidden_size"], "state_size"),
        ("nothing", ["num_heads"], None),
    ],
)
def test_names_of_other_projects_are_known(given, known, meant):
    assert suggestion(given, known) == (f"Did you mean {meant}?" if meant else "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rwkv6(**SIZES, head_size=12), "RWKV6Config: hidden_size must be a multiple of head_size = 12, got 16. Or pass num_heads."),
        (lambda: rwkv5(**SIZES, head_size=12), "RWKV5Config: hidden_size must be a multiple of head_size = 12, got 16. Or pass num_heads."),
        (lambda: rwkv6(**SIZES), "RWKV6Config: hidden_size must be a multiple of head_size = 64, got 16"),
        (lambda: gla(**SIZES, num_heads=3), "GLAConfig: expand_k must be such that hidden_size . expand_k is a multiple of num_heads = 3"),
        (lambda: retnet(**SIZES, num_heads=3), "RetentionConfig: expand_k must be such that"),
        (lambda: linear(**SIZES, num_heads=3), "LinearAttentionConfig: expand_k must be such that"),
        (lambda: Config(9, 16, 1, GLAConfig(2, expand_v=1e308)), "GLAConfig: expand_v must be such that"),
        (
            lambda: hybrid(gla(**SIZES), SoftmaxAttentionConfig(3), [0]),
            "SoftmaxAttentionConfig: hidden_size must be a multiple of",
        ),
        (
            lambda: hybrid(gla(**SIZES), SoftmaxAttentionConfig(16), [0]),
            "SoftmaxAttentionConfig: head_dim must be even with",
        ),
        (lambda: replace(gla(**SIZES), hidden_size=18), "GLAConfig: expand_k must be such that"),
    ],
)
def test_heads_that_do_not_divide_the_hidden_size_are_refused_by_the_configuration(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize("make", [rwkv5, rwkv6])
def test_the_number_of_heads_may_be_given(make):
    config = make(**SIZES, head_size=12, num_heads=3)
    model = CausalLM(config)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 9)
    assert model.layers[0].mixer.key.weight.shape == (36, 16)
    assert make(**SIZES, head_size=8) == replace(make(**SIZES, head_size=8, num_heads=2), mixer=make(**SIZES, head_size=8).mixer)
