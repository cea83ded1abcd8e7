"""Whether a call of a module runs the code of its class and nothing else. Only then may a kernel compute what the module would.

A module that has hooks, is wrapped, compiled or quantized, has an adapter, or whose ``forward`` was replaced, is called itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..call import private

Kind = TypeVar("Kind", bound=nn.Module)

_FORWARDS: dict[type[nn.Module], Any] = {kind: kind.forward for kind in (nn.GroupNorm, nn.LayerNorm, nn.Sequential)}
"""The ``forward`` with which a class was defined. It may be replaced later."""


def remembered(kind: type[Kind]) -> type[Kind]:
    """A class decorator: ``runs_as_written`` compares the ``forward`` of a class with the one it has now."""
    _FORWARDS[kind] = kind.forward
    return kind


def runs_as_written(one: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a call runs the ``forward`` of one of these classes and nothing else: no subclass, no hooks, no global module hooks."""
    return type(one) in kinds and inherits_forward(one, type(one))


def inherits_forward(one: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call runs the ``forward`` of this class and nothing else; the module may be of a subclass."""
    return (
        type(one).forward is _FORWARDS[kind] and one._compiled_call_impl is None and not hooked(one) and not private.global_module_hooks()
    )


def hooked(one: nn.Module) -> bool:
    """Whether a module has hooks, or a ``forward`` of its own."""
    hooks = one._forward_pre_hooks or one._forward_hooks or one._backward_pre_hooks or one._backward_hooks
    return bool(hooks) or "forward" in vars(one)


def unwrapped(one: nn.Module | None, kind: type[Kind]) -> Kind | None:
    """The module of this class that a wrapper holds, or the module itself. None if there is none."""
    return None if one is None else next((part for part in one.modules() if isinstance(part, kind)), None)
