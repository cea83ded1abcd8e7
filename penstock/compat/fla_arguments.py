"""The meaning of the arguments of fla's functions for these operators."""

from __future__ import annotations

FIRST = "Tensor [B,T,H,K]\nIn one dtype with k and v, any strides."
DECAY = "Log decay, natural logarithm, at most 0"
ARGUMENTS = {
    "q": FIRST,
    "r": FIRST,
    "k": "Tensor [B,T,H,K]",
    "v": "Tensor [B,T,H,V]",
    "g": (
        f"Tensor\n{DECAY}: [B,T,H] in simple_gla and gated_delta_rule, [B,T,H,K] in gla and kda.\n"
        "With ``use_gate_in_kernel`` a raw gate. Of chunk_rwkv6, the name of w in older versions."
    ),
    "gk": f"Tensor [B,T,H,K]\n{DECAY}. Optional but in dplr_delta_rule. In gated_delta_rule instead of g.",
    "gv": "None\nDecays of value channels are refused: no variant has them.",
    "w": f"Tensor [B,T,H,K]\n{DECAY}.",
    "u": "Tensor [H,K]\nThe bonus.",
    "beta": "Tensor [B,T,H]\nHow much of its key's value a token replaces; with ``use_beta_sigmoid_in_kernel`` its logit. Default: 1.",
    "a": "Tensor [B,T,H,K]\nWhat is removed is read by a. Of fused_mul_recurrent_rwkv7, the in-context learning rate.",
    "b": "Tensor [B,T,H,K]\nWhere what is removed is written.",
    "kk": "Tensor [B,T,H,K]\nThe normalised removal key: a is -kk, and b is kk times the learning rate.",
    "A_log": "Tensor [H], optional\nOf a raw gate x: the log decay is ``-exp(A_log) * softplus(x + dt_bias)``.",
    "dt_bias": "Tensor, optional\nAdded to a raw gate: [H], of kda [H*K] or [H,K].",
    "use_qk_l2norm_in_kernel": "bool\nDivide q and k by ``sqrt(sum(x^2) + 1e-6)``.",
    "use_beta_sigmoid_in_kernel": "bool\nbeta are logits.",
    "allow_neg_eigval": "bool\nTwice the sigmoid of the logits.",
    "use_gate_in_kernel": "bool\nThe gate is raw. Without it, A_log and dt_bias have no meaning.",
    "lower_bound": (
        "float, optional\nOf a raw gate x of kda: the log decay is ``lower_bound * sigmoid(exp(A_log) * (x + dt_bias))``; without A_log,\n"
        "as with zeros. Of rwkv7 and dplr_delta_rule, what no log decay is below, which saves time. Log decays of kda need no bound."
    ),
    "safe_gate": "bool\nA promise about log decays, which is not needed here: every log decay is exact and equally fast.",
    "disable_recompute": "bool\nWhat is kept for the backward pass is fixed for each implementation. It does not change results.",
    "return_intermediate_states": "bool\nTrue is refused.",
    "use_graph": "bool\nTrue is refused: torch captures calls as they are.",
    "max_num_seqs": "int, optional\nBelongs to use_graph.",
    "cp_context": "None\nContext parallelism of fla is refused.",
    "chunk_indices": "Tensor, optional\nIt is not needed here.",
    "g_gamma": "Tensor [H], optional\nThe log decay of each head, instead of g.",
    "scale": "float, optional\nMultiplies the output. Default: ``K ** -0.5``, also in rwkv6 (``penstock.rwkv6`` has 1), and for -1.",
    "initial_state": (
        "Tensor [N,H,K,V], optional\nAny floating dtype; [N,H,V,K] with ``state_v_first``.\n"
        "With ``normalize``, a pair of it and the running sum of keys [N,1,H,K]."
    ),
    "output_final_state": (
        "bool\nWhether to return the state after the last token, in the layout of ``initial_state``,\nfloat32 (float64 for float64 inputs)."
    ),
    "output_attentions": "bool\nWhether to return the attention matrix [B,H,T,T], H being the heads of v.",
    "state_v_first": "bool\nWhether states are [N,H,V,K].",
    "reverse": "bool\nRun time backwards.",
    "normalize": "bool\nDivide by ``scale * q . (running sum of keys) + 1e-10``.",
    "cu_seqlens": (
        "int32 or int64 Tensor [N+1], optional\n"
        "Packed sequences: B is 1, and sequence n is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``."
    ),
    "cu_seqlens_cpu": "Tensor, optional\nThe copy on the host is not needed here: no call waits for the device. It must equal cu_seqlens.",
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
