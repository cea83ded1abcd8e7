"""What ``accelerate`` puts in the place of transformers' functions of the delta rule.

Qwen3-Next, Qwen3.5, Qwen4 and OLMo-Hybrid have ``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule``; Kimi Linear,
Ling and GLM-5 have ``chunk_kimi_delta_attention`` and ``recurrent_kimi_delta_attention``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..delta.functional import gated_delta_rule, kda
from .transformers_packed import offsets

States = tuple[Tensor, Tensor | None]


def _replacements(name: str, function: Callable[..., States]) -> tuple[Callable[..., States], Callable[..., States]]:
    """For prompts and decode steps: query and key [B,T,G,K], value [B,T,H,V], beta [B,T,H], g [B,T,H] or [B,T,H,K], states [B,H,K,V]."""

    def chunk(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,  # theirs
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> States:
        return _run(name, function, (query, key, value, g, beta), initial_state, output_final_state, use_qk_l2norm_in_kernel, others)

    def recurrent(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> States:
        return _run(name, function, (query, key, value, g, beta), initial_state, output_final_state, use_qk_l2norm_in_kernel, others)

    return chunk, recurrent


def _run(
    name: str, function: Callable[..., States], tensors: tuple[Tensor, ...], initial_state: Tensor | None, output_final_state: bool,
    norm: bool, others: dict[str, Any],
) -> States:  # fmt: skip
    """Others are arguments of attention layers, which transformers passes along; of these, offsets of packed sequences count."""
    ends = offsets(name, tensors[0].shape[0], tensors[0].shape[1], others, cached=initial_state is not None or output_final_state)
    output, final = function(
        *tensors, use_qk_l2norm=norm, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=ends
    )
    return output, final


NAMES = {
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"): gated_delta_rule,
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"): kda,
}
REPLACED = {name: one for names, function in NAMES.items() for name, one in zip(names, _replacements(names[0], function))}
