"""Whole language models: a configuration for each architecture, and one causal model."""

from .causal_lm import CausalLM, LayerState, Output, State
from .checkpoints import load, load_adapter, load_tuned_state, save
from .config import Config, gla, hybrid, linear, mamba2, retnet, rwkv5, rwkv6, rwkv7
from .delta_configs import delta_net, gated_deltanet, kda
from .quantizing import quantize

__all__ = [
    "CausalLM",
    "Config",
    "LayerState",
    "Output",
    "State",
    "delta_net",
    "gated_deltanet",
    "gla",
    "hybrid",
    "kda",
    "linear",
    "load",
    "load_adapter",
    "load_tuned_state",
    "mamba2",
    "quantize",
    "retnet",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "save",
]
