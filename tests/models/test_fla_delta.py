"""fla's layout of DeltaNet, gated DeltaNet and Kimi delta attention: what it refuses."""

from pathlib import Path

import pytest
from public_models import delta, write_safetensors

from penstock import InvalidArgument
from penstock.layers import GatedDeltaNetConfig, KDAConfig, SwiGLUConfig
from penstock.models import CausalLM, Config, load, save


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            delta.config("delta_net", qk_activation="gelu"),
            "qk_activation in config.json must be one of silu, relu, elu, identity, got 'gelu'",
        ),
        (delta.config("delta_net", qk_norm=None), "qk_norm in config.json must be one of l2, sum, got None"),
        (delta.config("gated_deltanet", output_gate_activation="relu"), "output_gate_activation in config.json must be one of swish, silu"),
        (delta.config("gated_deltanet", num_heads=5), "num_heads in config.json must be such that 12 is a multiple of it, got 5"),
        (delta.config("kda", lower_bound=1.0), "lower_bound must be below 0 or None, got 1.0"),
        (delta.config("kda", allow_neg_eigval="yes"), "allow_neg_eigval in config.json must be true or false"),
        (delta.config("kda", use_short_conv=None, attnres_block_size=4), "attnres_block_size in config.json must be None, got 4"),
    ],
)
def test_configurations_of_the_delta_rule_are_refused(config: dict, message: str, tmp_path: Path) -> None:
    sizes = {**config, "num_heads": 2, "qk_activation": "silu", "qk_norm": "l2"}
    with pytest.raises(InvalidArgument, match=message):
        load(write_safetensors(delta.draw(sizes), config, tmp_path / "model"))


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (KDAConfig(2, head_dim=6, gate_low_rank_dim=5), "the rank of its gates is the size of a head of values"),
        (GatedDeltaNetConfig(2, head_dim=6, conv_bias=True), "its convolutions have no bias"),
        (GatedDeltaNetConfig(2, head_dim=6, norm_eps=1e-5), "all its norms are RMS norms of one eps"),
    ],
)
def test_mixers_of_the_delta_rule_that_fla_does_not_have(mixer, message: str, tmp_path: Path) -> None:
    config = Config(13, 24, 1, mixer, SwiGLUConfig(40))
    with pytest.raises(InvalidArgument, match=message):
        save(CausalLM(config), tmp_path / "model", "fla")
