"""Whole language models: a configuration for each architecture, and one causal model."""

from .causal_lm import CausalLM, LayerState, Output, State
from .checkpoints import load, load_adapter, load_tuned_state, save
from .config import Config, gla, hybrid, linear, mamba2, retnet, rwkv5, rwkv6, rwkv7

__all__ = [
    "CausalLM",
    "Config",
    "LayerState",
    "Output",
    "State",
    "gla",
    "hybrid",
    "linear",
    "load",
    "load_adapter",
    "load_tuned_state",
    "mamba2",
    "retnet",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "save",
]
