"""Whether a call of a module runs the code of its class and nothing else. Only then may a kernel compute what the module would.

A module that has hooks, is wrapped, compiled or quantized, has an adapter, or whose ``forward`` was replaced, is called itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..call import private

Kind = TypeVar("Kind", bound=nn.Module)

_FORWARDS: dict[type[nn.Module], Any] = {kind: kind.forward for kind in (nn.Embedding, nn.GroupNorm, nn.LayerNorm, nn.Sequential)}
"""The ``forward`` with which a class was defined. It may be replaced later."""


def remembered(kind: type[Kind]) -> type[Kind]:
    """A class decorator: ``altered`` compares the ``forward`` of a class with the one it has now."""
    _FORWARDS[kind] = kind.forward
    return kind


def altered(one: nn.Module, *kinds: type[nn.Module]) -> str | None:
    """Why a call does not only run the ``forward`` of one of these classes, or None: a subclass, hooks, global module hooks."""
    kind = type(one)
    if kind not in kinds:
        base = next((known.__name__ for known in kinds if isinstance(one, known)), None)
        return f"is a {kind.__name__}" if base is None else f"is a {kind.__name__}, a subclass of {base}"
    return overridden(one, kind)


def overridden(one: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why a call does not only run the ``forward`` of this class, or None; the module may be of a subclass."""
    if type(one).forward is not _FORWARDS[kind]:
        return f"is of the class {type(one).__name__}, whose forward was replaced"
    if one._compiled_call_impl is not None:
        return "is compiled"
    found = hooked(one)
    return found if found is not None or not private.global_module_hooks() else "is called with global module hooks"


def hooked(one: nn.Module) -> str | None:
    """The hooks of a module, or that it has a ``forward`` of its own; None if it has neither."""
    if one._forward_pre_hooks or one._forward_hooks:
        return "has a forward hook"
    if one._backward_pre_hooks or one._backward_hooks:
        return "has a backward hook"
    return "has a forward of its own" if "forward" in vars(one) else None


def gathers(one: nn.Module, kind: type[nn.Module], method: str) -> bool:
    """Whether ``fully_shard`` is all that changed a module of this class, and ``register_fsdp_forward_method`` this method of it."""
    if not hasattr(one, "unshard") or kind not in type(one).__bases__ or method not in vars(one) or "forward" in vars(one):
        return False
    own = len(one._forward_pre_hooks) == len(one._forward_hooks) == 1 and not one._backward_pre_hooks and not one._backward_hooks
    return own and type(one).forward is _FORWARDS[kind] and one._compiled_call_impl is None and not private.global_module_hooks()


def unwrapped(one: nn.Module | None, kind: type[Kind]) -> Kind | None:
    """The module of this class that a wrapper holds, or the module itself. None if there is none."""
    return None if one is None else next((part for part in one.modules() if isinstance(part, kind)), None)
