"""The public function for softmax attention."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .declaration import FUNCTION
from .operators import ATTENTION

WIDEST = 2**62


@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: int | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...
@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: int | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: int | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact softmax attention, for the layers of hybrid models that are not recurrent.

    .. math:: o_i = \sum_j e^{s_{ij} - lse_i} v_j, \qquad lse_i = \log \sum_j e^{s_{ij}}, \qquad s_{ij} = scale \cdot q_i \cdot k_j

    over the keys j that query i sees. Computed block by block with a running maximum and denominator, so that memory grows with T.
    Source: Dao et al. 2022 (FlashAttention), arXiv 2205.14135, algorithm 1, and Dao 2023, arXiv 2307.08691.

    q : Tensor [B,Tq,H,D]
        float16, bfloat16, float32 or float64, any strides.
    k, v : Tensor [B,Tk,G,D]
        H is a multiple of G: each head of k and v is shared by H / G consecutive heads of q.
    causal : bool
        Queries do not attend to later keys. The last query is aligned with the last key, also if Tq and Tk differ.
    scale : float, optional
        Default ``D ** -0.5``.
    cu_seqlens : int32 or int64 Tensor [N+1], optional
        Packed sequences: B is 1 and sequence n has queries ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``. Begins at 0, never falls, ends at Tq.
    cu_seqlens_k : int32 or int64 Tensor [N+1], optional
        The same of the keys. Default: as ``cu_seqlens``.
    window : int, optional
        Sliding window: a query attends only to keys less than ``window`` away, itself included. Default: all.
    return_lse : bool
        Whether to return the log-sum-exp, too.
    impl : str
        "triton" (a GPU; D up to 256; float16, bfloat16 and float32), "sdpa" (torch's operator), or "auto": triton where it takes the call.

    Returns the output [B,Tq,H,D] in q's dtype, or with ``return_lse`` that and the log-sum-exp [B,Tq,H], natural logarithm, float32
    (float64 for float64). Queries that see no key get 0 and -inf. Gradients flow from both to q, k and v, and can be
    differentiated again. Under autocast q, k and v are cast to its dtype.

    Raises ShapeError, DtypeError, DeviceError or RangeError (all InvalidArgument), listing every broken rule, and ImplementationRefused.

    >>> import torch
    >>> q, k, v = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    >>> softmax_attention(q, k, v).shape
    torch.Size([1, 5, 4, 16])
    >>> output, lse = softmax_attention(q, k, v, window=3, return_lse=True)
    >>> lse.shape
    torch.Size([1, 5, 4])
    """
    if isinstance(window, int) and window > WIDEST:
        window = WIDEST  # the largest int of torch's schemas; both mask nothing
    output, lse = ATTENTION(FUNCTION, (q, k, v, cu_seqlens, cu_seqlens_k), (causal, scale, window, return_lse), impl)
    assert output is not None
    return (output, lse) if return_lse and lse is not None else output
