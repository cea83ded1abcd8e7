"""The functions of flash-linear-attention (fla) 0.6.0 for our variants, and ``patch()``, which makes an installed fla run on them.

Every function has the parameters of fla's own, in its order and with its defaults (``inspect.signature`` shows them); ``FUNCTIONS`` is the
table of all of them. They return fla's pair: the output ``[B,T,H,V]``, and the final state, or None unless ``output_final_state``
(``parallel_`` functions: the attention matrix, or None unless ``output_attentions``).

``help(chunk_gla)`` says what the arguments mean, those of older versions too, which are keywords of every function that had them.

Gradients flow to every input, initial states included, and from final states (older versions detach both).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..call.declaration import Argument
from ..call.validation import check_tensor
from ..documentation import entries
from ..errors import Complaints, DtypeError, InvalidArgument, PenstockError
from ..recurrence import functional
from ..tokens.decays import retnet_decay
from ..tokens.declaration import INITIAL_STATE
from ..tokens.dtypes import state_dtype
from ..tokens.feature_maps import needs_float32, normalized
from ..tokens.sharing import repeated
from . import fla_delta
from .fla_arguments import ARGUMENTS, RETURNS
from .fla_call import OLD, OPTIONS, STATES, Call, Output
from .replacement import Place, Replacement

VERSIONS = ("0.6.0",)
"""The versions of fla that ``patch()`` knows."""
Function = Callable[..., Output]


def _linear_attn(call: Call) -> Output:
    q, k, v, options = call["q"], call["k"], call["v"], call.options
    if not call["normalize"]:
        _pair(call)
        return call.results(*functional.linear_attention(q, k, v, **options))
    options["initial_state"] = _with_sum_of_keys(call, *_pair(call))
    attend, wide = partial(functional.linear_attention, **options), needs_float32(q, k, v)
    if wide:
        q, k = q.float(), k.float()
    try:
        output, final = normalized(attend, q, k, v, wide, least=1e-10)
    except InvalidArgument:  # v has one more column there
        functional.linear_attention(q, k, v, **{**options, "initial_state": None})
        raise
    return call.results(output, None if final is None else (final[..., :-1], final[..., -1:].permute(0, 3, 1, 2)))


def _pair(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The state and the sum of keys that a call begins with."""
    state = call["initial_state"]
    if state is None or isinstance(state, Tensor):
        return state, None
    if call["normalize"]:
        if isinstance(state, tuple | list) and len(state) == 2 and all(x is None or isinstance(x, Tensor) for x in state):
            return state[0], state[1]
        rule, remedy = "a torch.Tensor, None, or a pair of them", "Pass the pair that a call with normalize=True returned."
    else:
        rule, remedy = "a torch.Tensor or None with normalize=False", "The first of the pair of a call with normalize=True is one."
    call.refuse("initial_state", rule, remedy, kind=DtypeError)


_KV, _Z = replace(INITIAL_STATE, name="initial_state[0]"), Argument("initial_state[1]", "N 1 H K")


def _with_sum_of_keys(call: Call, kv: Tensor | None, z: Tensor | None) -> Tensor | None:
    """A state [N,H,K,V] and a sum of keys [N,1,H,K] as one tensor [N,H,K,V+1], as ``normalized`` has it; a missing part is zero."""
    q, v, ends = call["q"], call["v"], call["cu_seqlens"]
    wrong = not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, v)) or not (ends is None or isinstance(ends, Tensor))
    if wrong or (kv is None and z is None):
        return None  # the operator refuses wrong tensors
    sizes = {"N": q.shape[0] if ends is None else ends.numel() - 1, "H": v.shape[2], "K": q.shape[3], "V": v.shape[3], "1": 1}
    complaints = Complaints(call.function)
    for argument, x in ((_KV if isinstance(call["initial_state"], tuple | list) else INITIAL_STATE, kv), (_Z, z)):
        if x is not None:
            check_tensor(complaints, argument, x, sizes, q.device, "q")
    complaints.raise_any()
    kv, z = (q.new_zeros(()).expand(*(sizes[axis] for axis in axes)) if x is None else x for x, axes in ((kv, "NHKV"), (z, "N1HK")))
    return torch.cat([kv, z.permute(0, 2, 3, 1)], -1)


def _retention(call: Call) -> Output:
    q, k, v = call["q"], call["k"], call["v"]
    output, final = functional.retention(q, k, v, **call.options)
    if call.get("output_attentions"):
        final = _attentions(call, retnet_decay(v).expand(v.shape[:3]))
    return call.results(output, final)


def _simple_gla(call: Call) -> Output:
    q, k, v, g, g_gamma = call["q"], call["k"], call["v"], call["g"], call.get("g_gamma")
    if g is not None and g_gamma is not None:
        call.refuse("g_gamma", "left out where g is given", "Add the two decays and pass the sum as g.")
    if g is not None:
        output, final = functional.simple_gla(q, k, v, g, **call.options)
    elif g_gamma is not None:
        output, final = functional.retention(q, k, v, g=g_gamma, **call.options)
    else:
        output, final = functional.linear_attention(q, k, v, **call.options)
    if call.get("output_attentions"):
        final = _attentions(call, g)
    return call.results(output, final)


def _attentions(call: Call, g: Tensor | None) -> Tensor:
    """The weights [B,H,T,T] by which the output is a sum of values, of the heads of v, in q's dtype; g [B,T,H]. Memory grows with T^2."""
    if call["cu_seqlens"] is not None:
        call.refuse("output_attentions", "False where cu_seqlens is given", "Call it once a sequence.")
    q, k, scale = call["q"], call["k"], call["scale"]
    dtype, heads = state_dtype(q.dtype), call["v"].shape[2]
    q, k = (repeated(x.to(dtype), heads) for x in (q, k))
    weights: Tensor = torch.einsum("bihk,bjhk->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if g is not None:
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril(-1)
        between = torch.where(later[:, :, None], g[:, :, None].to(dtype), 0).cumsum(1)  # [b, i, j, h]: the sum of g over j < t <= i
        weights = weights * between.exp().permute(0, 3, 1, 2)
    return weights.tril().to(call["q"].dtype)


def _gla(call: Call) -> Output:
    if call.get("gv") is not None:
        call.refuse("gv", "None", "No variant has decays of value channels. Use fla's own function for them.")
    g = call["gk"] if "gk" in call else call["g"]
    if g is None:
        output, final = functional.linear_attention(call["q"], call["k"], call["v"], **call.options)
    else:
        output, final = functional.gla(call["q"], call["k"], call["v"], g, **call.options)
    return call.results(output, final)


def _rwkv6(call: Call) -> Output:
    options = call.options
    if options["scale"] is None and isinstance(call["r"], Tensor) and call["r"].dim():
        options["scale"] = call["r"].shape[-1] ** -0.5
    output, final = functional.rwkv6(call["r"], call["k"], call["v"], call["w"], call["u"], **options)
    return call.results(output, final)


_REQUIRED = object()
_WEIGHTS = "scale=None output_attentions=False cu_seqlens=None"
_TABLE = (
    # (function, what runs it, the parameters of fla 0.6.0, the keywords of older versions)
    ("chunk_linear_attn", _linear_attn, f"q k v {STATES} normalize=True cu_seqlens=None", OLD),
    ("fused_chunk_linear_attn", _linear_attn, f"q k v {STATES} normalize=True cu_seqlens=None", OLD),
    ("fused_recurrent_linear_attn", _linear_attn, f"q k v {STATES} reverse=False normalize=False cu_seqlens=None", OLD),
    ("chunk_retention", _retention, f"q k v {STATES} cu_seqlens=None", f"{OLD} chunk_size=None"),
    ("fused_chunk_retention", _retention, f"q k v {STATES} cu_seqlens=None", OLD),
    (
        "fused_recurrent_retention", _retention, f"q k v {STATES} reverse=False state_v_first=False cu_seqlens=None",
        f"{OLD} transpose_state_layout=None",
    ),
    ("parallel_retention", _retention, f"q k v {_WEIGHTS}", OLD),
    (
        "chunk_simple_gla", _simple_gla, f"q k v g=None g_gamma=None {STATES} state_v_first=False cu_seqlens=None cu_seqlens_cpu=None",
        f"{OLD} chunk_size=None",
    ),
    ("fused_chunk_simple_gla", _simple_gla, f"q k v g=None g_gamma=None {STATES} cu_seqlens=None", OLD),
    (
        "fused_recurrent_simple_gla", _simple_gla, f"q k v g=None g_gamma=None {STATES} reverse=False state_v_first=False cu_seqlens=None",
        f"{OLD} transpose_state_layout=None",
    ),
    ("parallel_simple_gla", _simple_gla, f"q k v g=None {_WEIGHTS} cu_seqlens_cpu=None", OLD),
    ("chunk_gla", _gla, f"q k v g {STATES} state_v_first=False cu_seqlens=None cu_seqlens_cpu=None", f"{OLD} checkpoint_level=0"),
    ("fused_chunk_gla", _gla, f"q k v g {STATES}", "head_first=False causal=True"),  # as it was: in 0.6.0 it only raises
    (
        "fused_recurrent_gla", _gla, f"q k v gk=None gv=None {STATES} reverse=False state_v_first=False cu_seqlens=None",
        f"{OLD} transpose_state_layout=None",
    ),
    (
        "chunk_rwkv6", _rwkv6, f"r k v w u {STATES} cu_seqlens=None cu_seqlens_cpu=None",
        f"{OLD} q=None g=None chunk_size=None checkpoint_level=0",
    ),
    ("fused_recurrent_rwkv6", _rwkv6, f"r k v w u {STATES} reverse=False cu_seqlens=None", OLD),
    *fla_delta.TABLE,
)  # fmt: skip


def _parsed(parameters: str) -> dict[str, Any]:
    """``"q scale=None"`` as names and defaults; ``_REQUIRED`` without one."""
    pairs = (parameter.partition("=") for parameter in parameters.split())
    return {name: literal_eval(default) if equals else _REQUIRED for name, equals, default in pairs}


def _made(name: str, run: Callable[[Call], Output], parameters: str, older_parameters: str) -> Function:
    """A function of the table."""
    current, older = _parsed(parameters), _parsed(older_parameters)
    names = tuple(current)
    required = [one for one in names if current[one] is _REQUIRED]
    both = current | older
    defaults = tuple((option, both[option.name]) for option in OPTIONS if option.name in both)
    kind = type("Call", (Call,), {"__slots__": (), "function": name, "defaults": defaults})

    def function(*arguments: Any, **named: Any) -> Output:
        call = kind(current)
        call.update(zip(names, arguments))
        call.update(named)
        given = len(arguments)
        if given > len(names) or any(one not in both or one in names[:given] for one in named):
            raise TypeError(_misfit(name, names, arguments, named, set(both)))
        call.check()
        if len(call) > len(names):
            call = kind({**older, **call})
            call.settle_older(set(older), {*names[:given], *named})
        if given < len(required):
            for one in required:
                if call[one] is _REQUIRED:
                    raise TypeError(f"{name}: {one} must be given, got nothing. The parameters are {', '.join(names)}.")
        call.settle()
        try:
            return run(call)
        except InvalidArgument as error:
            raise call.of_caller(error) from None

    kinds = inspect.Parameter
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Fla's ``{name}`` on Penstock's operators.\n\n{entries([*current, *older], ARGUMENTS)}\n\n{RETURNS}\n"
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            kinds(one, way, default=kinds.empty if default is _REQUIRED else default)
            for way, table in ((kinds.POSITIONAL_OR_KEYWORD, current), (kinds.KEYWORD_ONLY, older))
            for one, default in table.items()
        ]
    )
    return function


def _misfit(name: str, names: tuple[str, ...], arguments: tuple[Any, ...], named: dict[str, Any], known: set[str]) -> str:
    """The message for arguments that do not fit the parameters."""
    if len(arguments) > len(names):
        return f"{name}: there must be at most {len(names)} positional arguments, got {len(arguments)}. They are {', '.join(names)}."
    unknown = sorted(named.keys() - known)
    if unknown:
        rest = ", ".join(sorted(known - set(names)))
        return f"{name}: keywords must be among {', '.join(names)} (older: {rest}), got {', '.join(unknown)}. Leave them out."
    twice = ", ".join(one for one in names[: len(arguments)] if one in named)
    return f"{name}: {twice} must be given once, got a positional argument and a keyword. Leave one out."


FUNCTIONS: Mapping[str, Function] = MappingProxyType({row[0]: _made(*row) for row in _TABLE})
"""Every function of this module by name."""

chunk_linear_attn = FUNCTIONS["chunk_linear_attn"]
fused_chunk_linear_attn = FUNCTIONS["fused_chunk_linear_attn"]
fused_recurrent_linear_attn = FUNCTIONS["fused_recurrent_linear_attn"]
chunk_retention = FUNCTIONS["chunk_retention"]
fused_chunk_retention = FUNCTIONS["fused_chunk_retention"]
fused_recurrent_retention = FUNCTIONS["fused_recurrent_retention"]
parallel_retention = FUNCTIONS["parallel_retention"]
chunk_simple_gla = FUNCTIONS["chunk_simple_gla"]
fused_chunk_simple_gla = FUNCTIONS["fused_chunk_simple_gla"]
fused_recurrent_simple_gla = FUNCTIONS["fused_recurrent_simple_gla"]
parallel_simple_gla = FUNCTIONS["parallel_simple_gla"]
chunk_gla = FUNCTIONS["chunk_gla"]
fused_chunk_gla = FUNCTIONS["fused_chunk_gla"]
fused_recurrent_gla = FUNCTIONS["fused_recurrent_gla"]
chunk_rwkv6 = FUNCTIONS["chunk_rwkv6"]
fused_recurrent_rwkv6 = FUNCTIONS["fused_recurrent_rwkv6"]
chunk_delta_rule = FUNCTIONS["chunk_delta_rule"]
fused_recurrent_delta_rule = FUNCTIONS["fused_recurrent_delta_rule"]
chunk_gated_delta_rule = FUNCTIONS["chunk_gated_delta_rule"]
chunk_gdn = FUNCTIONS["chunk_gdn"]
fused_recurrent_gated_delta_rule = FUNCTIONS["fused_recurrent_gated_delta_rule"]
fused_recurrent_gdn = FUNCTIONS["fused_recurrent_gdn"]
chunk_kda = FUNCTIONS["chunk_kda"]
fused_recurrent_kda = FUNCTIONS["fused_recurrent_kda"]
chunk_rwkv7 = FUNCTIONS["chunk_rwkv7"]
fused_recurrent_rwkv7 = FUNCTIONS["fused_recurrent_rwkv7"]
fused_mul_recurrent_rwkv7 = FUNCTIONS["fused_mul_recurrent_rwkv7"]
chunk_dplr_delta_rule = FUNCTIONS["chunk_dplr_delta_rule"]
fused_recurrent_dplr_delta_rule = FUNCTIONS["fused_recurrent_dplr_delta_rule"]

_UNPATCHED = ("fused_chunk_gla",)
"""fla 0.6.0 raises NotImplementedError in it, and its layers would store its state transposed to what their decode steps read."""


def patch() -> Replacement:
    """Make the layers and models of an installed fla run on Penstock's operators, until ``restore()`` or the end of a ``with`` block.

    Replaces the functions of this module (except ``fused_chunk_gla``, which fla 0.6.0 does not implement) wherever a module of fla holds
    them. Modules outside fla that have imported a function by name keep what they imported. Generation with fla's cache works as before:
    states have fla's layouts. fla's norms, convolutions and other kernels are untouched.

    Returns the ``Replacement``, whose ``replaced`` says what was replaced. Raises PenstockError where fla is not installed or is a version
    that this module does not know. ::

        with patch() as patched:
            print(patched.replaced)
            model.generate(ids)
    """
    try:
        fla, ops, layers = (importlib.import_module(name) for name in ("fla", "fla.ops", "fla.layers"))
        for found in pkgutil.iter_modules(layers.__path__):  # not all of them are imported with the package
            importlib.import_module(f"fla.layers.{found.name}")
    except ImportError as error:
        raise PenstockError(f"patch: fla must be installed, got {error!r}. Install flash-linear-attention=={VERSIONS[-1]}.") from error
    if fla.__version__ not in VERSIONS:
        remedy = "Call the functions of penstock.compat.fla instead, whose parameters are those of 0.6.0."
        raise PenstockError(f"patch: fla must be of version {' or '.join(VERSIONS)}, got {fla.__version__}. {remedy}")

    def places() -> Iterator[Place]:
        ours = {id(_theirs(ops, name)): one for name, one in FUNCTIONS.items() if name not in _UNPATCHED}
        ours |= {id(one): one for one in ours.values()}  # already patched: counted once more
        return (Place(module, name, ours[id(value)]) for module, name, value in _names_of_fla() if id(value) in ours)

    return Replacement(places)


def _theirs(ops: Any, name: str) -> object:
    """The function of fla: all but one are names of ``fla.ops``."""
    return getattr(ops.rwkv7 if name == "fused_mul_recurrent_rwkv7" else ops, name)


def _names_of_fla() -> Iterator[tuple[Any, str, object]]:
    for path, module in sorted(sys.modules.items()):
        if path == "fla" or path.startswith("fla."):
            for name, value in sorted(vars(module).items()):
                yield module, name, value
