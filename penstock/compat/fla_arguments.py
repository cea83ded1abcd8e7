"""The meaning of the arguments of fla's functions for these operators."""

from __future__ import annotations

FIRST = "Tensor [B,T,H,K]\nIn one dtype with k and v, any strides."
DECAY = "Log decay, natural logarithm, at most 0"
ARGUMENTS = {
    "q": FIRST,
    "r": FIRST,
    "k": "Tensor [B,T,H,K]",
    "v": "Tensor [B,T,H,V]",
    "g": f"Tensor\n{DECAY}: [B,T,H] in simple_gla, [B,T,H,K] in gla. Of chunk_rwkv6, the name of w in older versions.",
    "gk": f"Tensor [B,T,H,K], optional\n{DECAY}.",
    "gv": "None\nDecays of value channels are refused: no variant has them.",
    "w": f"Tensor [B,T,H,K]\n{DECAY}.",
    "u": "Tensor [H,K]\nThe bonus.",
    "g_gamma": "Tensor [H], optional\nThe log decay of each head, instead of g.",
    "scale": "float, optional\nMultiplies the output. Default: ``K ** -0.5``, also in rwkv6 (``penstock.rwkv6`` has 1), and for -1.",
    "initial_state": (
        "Tensor [N,H,K,V], optional\nAny floating dtype; [N,H,V,K] with ``state_v_first``.\n"
        "With ``normalize``, a pair of it and the running sum of keys [N,1,H,K]."
    ),
    "output_final_state": (
        "bool\nWhether to return the state after the last token, in the layout of ``initial_state``,\nfloat32 (float64 for float64 inputs)."
    ),
    "output_attentions": "bool\nWhether to return the attention matrix [B,H,T,T].",
    "state_v_first": "bool\nWhether states are [N,H,V,K].",
    "reverse": "bool\nRun time backwards.",
    "normalize": "bool\nDivide by ``scale * q . (running sum of keys) + 1e-10``.",
    "cu_seqlens": (
        "int32 or int64 Tensor [N+1], optional\n"
        "Packed sequences: B is 1, and sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``."
    ),
    "cu_seqlens_cpu": "Tensor, optional\nThe copy on the host is not needed here: no call waits for the device.",
    "head_first": "bool\nOlder versions: tokens and heads are the other way round, [B,H,T,...], in the inputs and the output.",
    "causal": "bool\nOlder versions: True is how every function works; False is refused.",
    "offsets": "Tensor, optional\nThe name of cu_seqlens in older versions.",
    "transpose_state_layout": "bool, optional\nThe name of state_v_first in older versions.",
    "chunk_size": "int, optional\nA block size of fla's kernels, a power of 2. It does not change results.",
    "checkpoint_level": "int\nRefused unless 0: what is kept for the backward pass is fixed for each implementation.",
}
RETURNS = """\
Returns a pair: the output [B,T,H,V], and the final state, or None unless ``output_final_state`` (``parallel_`` functions: the attention
matrix, or None unless ``output_attentions``). Gradients flow to every input, initial states included, and from final states."""
