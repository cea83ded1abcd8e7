"""Triton's interpreter as the tests use it: it refuses masks that are not booleans, sums products in order, and patches Triton's language
once a launch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def patched(patch: pytest.MonkeyPatch) -> None:
    """The interpreter of this process, until the patch is undone."""
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        whole = getattr(interpreter.InterpreterBuilder, name)
        patch.setattr(interpreter.InterpreterBuilder, name, with_boolean_mask(whole, place))
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", product_in_order)
    if hasattr(interpreter, "_LangPatchScope"):  # not in Triton 3.4
        language = Language()
        patch.setattr(interpreter, "_patch_lang", language)
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *given, **options: language.launched(*given, **options))


def with_boolean_mask(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A method of the interpreter's builder that takes its mask at this place only if its values are booleans.

    Triton 3.9 refuses other masks. Older versions would hide them.
    """

    @wraps(method)
    def checked(self: object, *arguments: Any) -> Any:
        assert arguments[place].data.dtype == bool, "a scalar condition of a mask must be uniform(condition), see gpu/tiles.py"
        return method(self, *arguments)

    return checked


TERMS = 8
"""That a tensor core adds to a sum at a time: the fewest, those of TF32."""


def product_in_order(builder: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
    """In place of ``create_dot``: the product a b + d, summed over K as tensor cores do, a few terms at a time, which are rounded once.

    NumPy's library sums even and odd terms apart. The terms of products with the inverse of a chunk alternate in sign: their sum is small,
    and that of every second term is not.
    """
    total, wide = d.data.copy(), np.float64
    for k in range(0, a.data.shape[-1], TERMS):
        terms = a.data[..., :, k : k + TERMS].astype(wide) @ b.data[..., k : k + TERMS, :].astype(wide)
        total = (total + terms).astype(total.dtype)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@contextmanager
def within_bounds() -> Iterator[None]:
    """In this block, loads and stores outside of the tensors of their launch raise AssertionError. Elements that a mask excludes may be.

    For kernels without descriptors.
    """
    bounds: list[tuple[int, int]] = []
    launch = interpreter.GridExecutor.__call__

    def launched(executor: Any, *arguments: Any, **options: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        bounds[:] = [(x.untyped_storage().data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()) for x in tensors]
        launch(executor, *arguments, **options)

    def checked(method: Callable[..., Any], place: int) -> Callable[..., Any]:
        @wraps(method)
        def access(builder: Any, *arguments: Any) -> Any:
            pointers, mask = arguments[0], arguments[place]
            size = pointers.get_element_ty().primitive_bitwidth // 8
            at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
            inside = np.zeros(at.shape, dtype=bool)
            for first, last in bounds:
                inside |= (at >= first) & (at + size <= last)
            assert inside.all(), f"{np.count_nonzero(~inside)} elements are outside of all tensors"
            return method(builder, *arguments)

        return access

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            patch.setattr(interpreter.InterpreterBuilder, name, checked(getattr(interpreter.InterpreterBuilder, name), place))
        yield


class Language:
    """Triton's language, patched while launches run.

    Triton patches it again at every call of a function by a kernel, which takes longer than most functions, and does not restore it.
    """

    def __init__(self) -> None:
        self.patch, self.launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        self.running, self.lock = 0, Lock()

    def __call__(self, function: Any) -> Any:
        """In place of ``_patch_lang``."""
        return SimpleNamespace(restore=lambda: None) if self.running else self.patch(function)

    def launched(self, grid: Any, *arguments: Any, **options: Any) -> None:
        """In place of ``GridExecutor.__call__``."""
        with self.lock:
            if not self.running:
                self.scope = self.patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            self.running += 1
        try:
            self.launch(grid, *arguments, **options)
        finally:
            with self.lock:
                self.running -= 1
                if not self.running:
                    self.scope.restore()
