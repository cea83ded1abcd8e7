"""The private names of torch that the library uses, with fallbacks.

Each name is looked up once, when this module is imported. ``MISSING`` lists the names that this torch does not have. Results do not depend
on any of them. Without a name that ``fast`` needs, calls are slower: all of them go through the operators in ``torch.ops``. A torch newer
than those in which the names were checked warns once. Then names that have a public alternative are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .versions import checked

with suppress(ImportError):
    import torch.utils._device

MISSING: list[str] = []


def _private(name: str) -> Any:
    """``torch.<name>``, or None if torch does not have it."""
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        MISSING.append(name)
        return None


_dispatch_keys = _private("_C._dispatch_keys")
_dispatch_modes = _private("_C._len_torch_dispatch_stack")
_dispatch_mode = _private("_C._get_dispatch_mode")
_tracers = [_private(f"_C._TorchDispatchModeKey.{name}") for name in ("PROXY", "FAKE", "FUNCTIONAL")]
_function_modes = _private("_C._len_torch_function_stack")
_function_mode_at = _private("_C._get_function_stack_at")
_default_device = _private("utils._device.DeviceContext")
_transforms = _private("_C._functorch.get_interpreter_stack")
_transform = _private("_C._functorch.peek_interpreter_stack") or _transforms
_jvp = _private("_C._functorch.TransformType.Jvp")
_tracing_state = _private("_C._get_tracing_state")
autocasting: Callable[[], bool] = _private("_C._is_any_autocast_enabled") or (lambda: True)
"""Whether autocast is on for some device type; True if unknown."""
_profiler_enabled = _private("_C._autograd._profiler_enabled")
_saved_tensor_hooks = _private("_C._autograd._top_saved_tensors_default_hooks")
global_module_hooks: Callable[[], object] = _private("nn.modules.module._has_any_global_hook") or (lambda: True)
"""Whether there are global module hooks; true if unknown."""
_queue_callback = _private("autograd.Variable._execution_engine.queue_callback")
_fake_tensor = _private("_subclasses.FakeTensor")
_is_wrapped = _private("_C._functorch.is_functorch_wrapped_tensor")
_is_batch = _private("_C._functorch.is_legacy_batchedtensor")
_unwrap = _private("_C._functorch.get_unwrapped")
_is_lazy_zero = _private("Tensor._is_zerotensor")
_CHECKED = checked("torch")
_CUDA = torch.version.cuda and _CHECKED
_raw_stream = _private("_C._cuda_getCurrentRawStream") if _CUDA else None
_current_device = _private("_C._cuda_getDevice") if _CUDA else None
_empty_cuda = _private("_C._dynamo.guards._empty_strided_cuda") if _CUDA else None
if _private("autograd.forward_ad._current_level") is None:
    _forward_ad: Any = None
else:
    from torch.autograd import forward_ad as _forward_ad

FAST_PATH = _CHECKED and None not in (_dispatch_keys, _dispatch_modes, _function_modes, _transform, _tracing_state, _forward_ad)
"""Whether torch has all names that ``fast`` needs, and is not newer than those in which they were checked."""
_TYPES = frozenset({Tensor, torch.nn.Parameter})
_KINDS = ("cpu", "cuda")
_plain_keys: set[int] = set()
"""Dispatch keys of plain tensors, as integers, for the device types in ``_learned``."""
_learned: set[str] = set()


def fast(tensors: Iterable[object]) -> bool:
    """Whether a call with these tensors (or None) may skip torch's dispatcher.

    True for dense tensors without lazy negation or conjugation if there are no subclasses and no mode, transform or tracer is active. A
    default device (``torch.set_default_device``, ``with torch.device(...)``) is a mode for torch, and changes no call.
    Then only autograd needs to see the call. All other calls go through the operator.
    """
    if (
        not FAST_PATH
        or torch.compiler.is_compiling()
        or _dispatch_modes()
        or (_function_modes() and not _default_devices_alone())
        or _transform() is not None
        or _tracing_state() is not None
        or _forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:
        if x is not None and (type(x) not in _TYPES or (_dispatch_keys(x).raw_repr() not in _plain_keys and not _is_plain(x))):  # type: ignore[arg-type]
            return False
    return True


def _default_devices_alone() -> bool:
    """Whether all function modes set the default device, which a call with tensors does not ask for."""
    if None in (_function_mode_at, _default_device):
        return False
    return all(type(_function_mode_at(place)) is _default_device for place in range(_function_modes()))


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has the dispatch keys of a new tensor on its device."""
    kind = x.device.type
    if kind not in _KINDS:
        return False
    if kind not in _learned:
        for inference in (False, True):
            with torch.inference_mode(inference):
                _plain_keys.add(_dispatch_keys(torch.empty(0, device=kind)).raw_repr())
        _learned.add(kind)
    return _dispatch_keys(x).raw_repr() in _plain_keys


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return _transform is not None and _transform() is not None


def transforming() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    return in_transform() or (_forward_ad is not None and _forward_ad._current_level >= 0)


# as torch.compiler.assume_constant_result, which imports the compiler: transforms inside of a compiled graph are active when it is traced
transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forward_derivatives() -> bool:
    """Whether one of the active transforms takes forward derivatives."""
    if _forward_ad is not None and _forward_ad._current_level >= 0:
        return True
    return _transforms is not None and any(one.key() == _jvp for one in _transforms() or ())


forward_derivatives._dynamo_marked_constant = True  # type: ignore[attr-defined]


def tracing_derivatives() -> bool:
    """Whether forward derivatives are taken inside of a dispatch mode, as by ``torch.func.linearize``; values cannot be read there."""
    return _dispatch_modes is not None and bool(_dispatch_modes()) and forward_derivatives()


def traced() -> bool:
    """Whether torch records operators or computes shapes alone, as under ``make_fx`` and compiled autograd; False if unknown."""
    if None in (_dispatch_modes, _dispatch_mode, *_tracers) or not _dispatch_modes():
        return False
    return any(_dispatch_mode(key) is not None for key in _tracers)


def inside_transforms(x: Tensor) -> Tensor | None:
    """The tensor that torch.func's transforms wrap; None if its values cannot be read here."""
    if None in (_is_wrapped, _unwrap, _dispatch_modes) or _dispatch_modes() or is_fake(x):
        return None
    while _is_wrapped(x):
        x = _unwrap(x)
    return x.detach()


def batched(x: Tensor) -> bool:
    """Whether a gradient is one of a batch: under a transform, or by ``torch.autograd.grad(is_grads_batched=True)``, False if unknown."""
    return not torch.compiler.is_compiling() and (in_transform() or (_is_batch is not None and bool(_is_batch(x))))


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has a shape but no data, as under ``torch.compile``. If unknown, True for all subclasses."""
    return x.is_meta or (type(x) not in _TYPES if _fake_tensor is None else isinstance(x, _fake_tensor))


def is_lazy_zero(x: Tensor) -> bool:
    """Whether a tensor is zero and has no memory, as autograd may create it."""
    return _is_lazy_zero is not None and bool(_is_lazy_zero(x))


def profiling() -> bool:
    """Whether torch's profiler is running; True if unknown."""
    return _profiler_enabled is None or bool(_profiler_enabled())


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The functions of the innermost ``torch.autograd.graph.saved_tensors_hooks``; None without hooks, or if unknown."""
    return None if _saved_tensor_hooks is None else _saved_tensor_hooks(False)


def at_end_of_backward(function: Callable[[], object]) -> bool:
    """Call the function at the end of this thread's backward pass. False outside a backward pass; True, without the call, if unknown."""
    if _queue_callback is not None:
        try:
            _queue_callback(function)
        except RuntimeError:
            return False
    return True


def raw_stream(device: int) -> int:
    """The address of the current CUDA stream of a device."""
    return int(_raw_stream(device) if _raw_stream is not None else torch.cuda.current_stream(device).cuda_stream)


def current_device() -> int:
    """The current CUDA device, once CUDA is initialised."""
    return int(_current_device() if _current_device is not None else torch.cuda.current_device())


def empty_strided(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function of shape, strides and dtype that allocates on a device, the current one of its type. torch's public one takes twice
    the time.
    """
    if device.type == "cuda" and _empty_cuda is not None:
        return _empty_cuda  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)
