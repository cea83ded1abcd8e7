"""One call of a function of fla: its arguments by name, and the results as the caller lays them out."""

from __future__ import annotations

from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..call.declaration import Option, Wrong
from ..call.validation import check_option, reads_values
from ..delta.declaration import LOWER_BOUND
from ..errors import Complaints, DtypeError, InvalidArgument, RangeError, described, shortened

Output = tuple[Tensor, Any]
EARLIER_NAMES = {"offsets": "cu_seqlens", "transpose_state_layout": "state_v_first", "q": "r", "g": "w"}
PER_TOKEN = ("q", "r", "k", "v", "g", "gk", "w", "beta", "a", "b", "kk")
"""Arguments with axes of tokens and heads."""
STATES = "scale=None initial_state=None output_final_state=False"
"""The parameters of states, which most functions have."""
OLD = "head_first=False causal=True offsets=None"
"""The keywords of older versions that most functions had."""


def _power_of_2(value: int) -> Wrong | None:
    remedy = "It does not change results: leave it out."
    return None if value > 0 and value & (value - 1) == 0 else Wrong("a power of 2", shortened(value), remedy)


def _zero(value: int) -> Wrong | None:
    remedy = "What is kept for the backward pass is fixed for each implementation: leave it out."
    return None if value == 0 else Wrong("0", shortened(value), remedy)


def _positive(value: int) -> Wrong | None:
    return None if value > 0 else Wrong("at least 1", shortened(value))


_FLAGS = (
    "head_first causal reverse normalize output_attentions state_v_first use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "allow_neg_eigval use_gate_in_kernel safe_gate disable_recompute return_intermediate_states use_graph"
)
OPTIONS = (
    *(Option(name, "bool") for name in _FLAGS.split()),
    Option("output_final_state", "bool", optional=True),  # fla's layers pass their use_cache, which may be None
    Option("transpose_state_layout", "bool", optional=True),
    Option("chunk_size", "int", optional=True, values=_power_of_2),
    Option("checkpoint_level", "int", values=_zero),
    Option("max_num_seqs", "int", optional=True, values=_positive),
    LOWER_BOUND,
)
"""Numbers and flags. They are checked here, because some are not passed on. The operators check the scale."""
UNUSED_TENSORS = ("A_log", "dt_bias", "chunk_indices", "cu_seqlens_cpu")
"""Tensors that are not passed on in some calls."""


class Call(dict[str, Any]):
    """The arguments of one call by name; those of older versions only where the caller passed one."""

    __slots__ = ()
    function: str
    defaults: tuple[tuple[Option, Any], ...]
    """Its numbers and flags, and their defaults."""

    def check(self) -> None:
        """Raise for numbers and flags of a wrong type or value, and for what is no tensor among tensors that may not be used."""
        complaints = Complaints(self.function)
        for option, default in self.defaults:
            value = self.get(option.name, default)
            if value is not default:
                check_option(complaints, option, value)
        for name in UNUSED_TENSORS:
            x = self.get(name)
            if x is not None and not isinstance(x, Tensor):
                complaints.add(DtypeError, name, "a torch.Tensor or None", described(x), f"Convert it with torch.as_tensor({name}).")
        complaints.raise_any()

    def refuse(
        self, argument: str, rule: str, remedy: str, kind: type[InvalidArgument] = RangeError, value: object = None
    ) -> NoReturn:  # fmt: skip
        """Raise for the value of an argument, or ``value`` of it."""
        complaints = Complaints(self.function)
        complaints.add(kind, argument, rule, described(self.get(argument)) if value is None else value, remedy)
        complaints.raise_any()
        raise AssertionError

    def settle_older(self, older: set[str], given: set[str]) -> None:
        """Give the arguments of older versions their meaning, or refuse them; ``given`` are the names that the caller passed."""
        for earlier in older & given & EARLIER_NAMES.keys():
            name = EARLIER_NAMES[earlier]
            if name in given:
                self.refuse(earlier, f"left out where {name} is given", f"It is an earlier name of {name}.")
            self[name] = self[earlier]
        if not self["causal"]:
            self.refuse("causal", "True", "Every variant is causal. reverse=True of the fused_recurrent functions runs time backwards.")
        if self["head_first"]:
            for name in PER_TOKEN:
                if isinstance(self.get(name), Tensor) and self[name].dim() > 2:
                    self[name] = self[name].transpose(1, 2)

    def settle(self) -> None:
        """Bring the arguments into the form that the operators take: views, and no copies."""
        scale, state, host = self["scale"], self.get("initial_state"), self.get("cu_seqlens_cpu")
        if isinstance(scale, (Real, torch.SymInt, torch.SymFloat)) and scale == -1:
            self["scale"] = None  # the default of older versions
        if state is not None and self.get("state_v_first") and isinstance(state, Tensor) and state.dim() > 1:
            self["initial_state"] = state.transpose(-1, -2)
        if host is not None:
            self._check_copy(host, self["cu_seqlens"])

    def _check_copy(self, host: Tensor, ends: object) -> None:
        """Raise unless the offsets on the host are those of the call, as far as they can be read without waiting for a device."""
        if ends is None:
            self.refuse("cu_seqlens_cpu", "left out without cu_seqlens", "Pass cu_seqlens, on the device of q.")
        if not isinstance(ends, Tensor):
            return  # the operator refuses it
        equal = host.shape == ends.shape
        if equal and not torch.compiler.is_compiling() and reads_values(host) and reads_values(ends):
            equal = bool((host.to(ends.device) == ends).all())
        if not equal:
            self.refuse("cu_seqlens_cpu", "a copy of cu_seqlens", "Pass cu_seqlens.cpu(), or leave it out.")

    def of_caller(self, error: InvalidArgument) -> InvalidArgument:
        """An error of an operator, in the names and the layouts of the caller."""
        names = {"raw_decay": "penstock.rwkv7 and raw_decay"}
        if "kk" in self:
            names |= {"a": "kk", "b": "a"}
        if "gk" in self and (self["gk"] is not None or "g" not in self):
            names["g"] = "gk"
        elif self.get("g_gamma") is not None:
            names["g"] = "g_gamma"
        for earlier, name in EARLIER_NAMES.items():
            if name in self and self.get(earlier) is not None:
                names[name] = earlier
        left_out = [name for name in ("g", "beta", "A_log") if self.get(names.get(name, name)) is None]
        swapped = {"initial_state": (-2, -1)} if self.get("state_v_first") else {}
        if self.get("head_first"):
            swapped |= dict.fromkeys(PER_TOKEN, (1, 2))
            names["Tokens come before heads"] = "With head_first, heads come before tokens"
            names["k.repeat_interleave(n, 2) repeats each"] = "k.repeat_interleave(n, 1) repeats each"
        return error.of(self.function, names, left_out, swapped)

    def results(self, output: Tensor, second: Any) -> Output:
        """The output and the state as the caller lays them out: views."""
        if self.get("head_first"):
            output = output.transpose(1, 2)
        return output, second.transpose(-1, -2) if self.get("state_v_first") and second is not None else second

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that the functions of the recurrence take under the same names."""
        return {**self.forwards, "reverse": self.get("reverse", False)}

    @property
    def forwards(self) -> dict[str, Any]:
        """The same without ``reverse``, which the functions of the delta rule do not take."""
        return {
            "scale": self["scale"],
            "initial_state": self.get("initial_state"),
            "output_final_state": bool(self.get("output_final_state")),
            "cu_seqlens": self.get("cu_seqlens"),
        }
