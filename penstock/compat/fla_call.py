"""One call of a function of fla: its arguments by name, and the results as the caller lays them out."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ..errors import Complaints, RangeError, described

Output = tuple[Tensor, Any]
EARLIER_NAMES = {"offsets": "cu_seqlens", "transpose_state_layout": "state_v_first", "q": "r", "g": "w"}
STATES = "scale=None initial_state=None output_final_state=False"
"""The parameters of states, which most functions have."""
OLD = "head_first=False causal=True offsets=None"
"""The keywords of older versions that most functions had."""


class Call(dict[str, Any]):
    """The arguments of one call by name; those of older versions only where the caller passed one."""

    __slots__ = ()
    function: str

    def refuse(self, argument: str, rule: str, remedy: str, value: object = None) -> NoReturn:
        """Raise RangeError for the value of an argument, or ``value`` of it."""
        complaints = Complaints(self.function)
        complaints.add(RangeError, argument, rule, described(self.get(argument)) if value is None else value, remedy)
        complaints.raise_any()
        raise AssertionError

    def settle_older(self, older: set[str], given: set[str]) -> None:
        """Give the arguments of older versions their meaning, or refuse them; ``given`` are the names that the caller passed."""
        for earlier in older & given & EARLIER_NAMES.keys():
            name = EARLIER_NAMES[earlier]
            if name in given:
                self.refuse(earlier, f"left out where {name} is given", f"It is an earlier name of {name}.")
            self[name] = self.pop(earlier)
        if not self["causal"]:
            self.refuse("causal", "True", "Every variant is causal. reverse=True of the fused_recurrent functions runs time backwards.")
        if self.get("checkpoint_level"):
            self.refuse("checkpoint_level", "0", "What is kept for the backward pass is fixed for each implementation: leave it out.")
        size = self.get("chunk_size")
        if size is not None and not (isinstance(size, int) and size > 0 and size & (size - 1) == 0):
            self.refuse("chunk_size", "a power of 2 or None", "It does not change results: leave it out.")
        if self["head_first"]:
            for name in ("q", "r", "k", "v", "g", "gk", "w", "beta", "a", "b", "kk"):
                if isinstance(self.get(name), Tensor) and self[name].dim() > 2:
                    self[name] = self[name].transpose(1, 2)

    def settle(self) -> None:
        """Bring the arguments into the form that the operators take: views, and no copies."""
        scale, state = self["scale"], self.get("initial_state")
        if scale is not None and not isinstance(scale, Tensor) and scale == -1:
            self["scale"] = None  # the default of older versions
        if state is not None and self.get("state_v_first") and isinstance(state, Tensor):
            self["initial_state"] = state.transpose(-1, -2)
        if self.get("cu_seqlens_cpu") is not None and self["cu_seqlens"] is None:
            self.refuse("cu_seqlens_cpu", "left out without cu_seqlens", "Pass cu_seqlens, on the device of q.")

    @property
    def renamed(self) -> dict[str, str]:
        """The caller's names of arguments that have other names in the operators."""
        names = {"a": "kk", "b": "a"} if "kk" in self else {}
        for decay in ("gk", "g_gamma"):
            if self.get(decay) is not None:
                names["g"] = decay
        return names

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
