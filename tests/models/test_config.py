"""Configurations refuse values of wrong types and sizes before anything is built."""

import math

import pytest
import torch

from penstock.errors import InvalidArgument
from penstock.layers import GLAConfig, Mamba2Config, RetentionConfig, RWKV6Config, SoftmaxAttentionConfig, SwiGLUConfig
from penstock.models import CausalLM, Config, gla, hybrid, linear, mamba2, retnet, rwkv5, rwkv6

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
