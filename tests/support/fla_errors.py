"""What every function of ``penstock.compat.fla`` says about wrong arguments: in the caller's names, values and layouts."""

import inspect
import re

import pytest
import torch
from torch import Tensor

from penstock.errors import DtypeError, InvalidArgument

OPTIONAL = ("output_final_state", "transpose_state_layout")


def raised(function, call):
    """The error of a call, each line of which names the function and arguments of the call."""
    with pytest.raises(InvalidArgument) as caught:
        function(**call)
    for one in caught.value.complaints:
        assert one.function == function.__name__, str(one)
        assert one.argument in call or one.argument in "BTGHJKV", str(one)
        for name in re.findall(r"as_tensor\((\w+)\)|with (?!torch)(\w+)\.\w+\(|where (\w+) is", f"{one.rule} {one.remedy}"):
            assert "".join(name) in call, str(one)
        x = call.get(one.argument)
        if "of shape" in one.rule and isinstance(x, Tensor):
            assert one.value == str(list(x.shape)), str(one)
    return [one.argument for one in caught.value.complaints]


def wrong_tensors(x):
    """Tensors and others that cannot take the place of x."""
    yield [1.0]
    yield "x"
    yield x.long()
    yield x.to("meta")
    yield x[..., None]
    yield x[:, :-1] if x.dim() > 1 else x[:-1]


def refuses_wrong_tensors(function, call):
    """Errors name each argument that is wrong, show it as it was passed, and name nothing that was not passed."""
    for name, x in call.items():
        if isinstance(x, Tensor):
            for wrong in wrong_tensors(x):
                found = raised(function, {**call, name: wrong})
                first = name == next(iter(call)) and isinstance(wrong, Tensor)  # which the others are compared with
                assert first or name in found, (name, found)


def refuses_wrong_states(function, call, state):
    """The shape of a state is shown in its layout."""
    parameters = inspect.signature(function).parameters
    for options in ({}, *({one: True} for one in ("state_v_first", "transpose_state_layout") if one in parameters)):
        x = state.transpose(-1, -2) if options else state
        for wrong in (x.transpose(-1, -2), x[..., 0], x[0, 0, 0], x[0, 0, 0, 0], x[:, :1], x.long(), "x"):
            assert raised(function, {**call, **options, "initial_state": wrong}) == ["initial_state"]


def refuses_wrong_options(function, call):
    """Flags are True or False, and numbers that change nothing are checked, too."""
    parameters = inspect.signature(function).parameters
    flags = [name for name, one in parameters.items() if isinstance(one.default, bool) or name == "transpose_state_layout"]
    wrong = [(name, value) for name in flags for value in ("no", 1, torch.zeros(2), *(() if name in OPTIONAL else (None,)))]
    numbers = {"chunk_size": (-3.5, "x", 48, 0, True), "max_num_seqs": ("y", 0), "lower_bound": ("x", 1.0), "checkpoint_level": (1, None)}
    wrong += [(name, value) for name, values in numbers.items() if name in parameters for value in values]
    wrong += [(name, "x") for name in ("A_log", "dt_bias", "chunk_indices") if name in parameters]
    for name, value in wrong:
        with pytest.raises(InvalidArgument, match=rf"^{function.__name__}: {name} must be") as caught:
            function(**{**call, name: value})
        assert name not in flags or type(caught.value) is DtypeError
    for name in OPTIONAL:
        if name in parameters:
            assert torch.equal(function(**{**call, name: None})[0], function(**call)[0])


def refuses_wrong_offsets(function, call):
    """Errors name offsets as the caller does, and those on the host are equal to the others."""
    parameters, tokens = inspect.signature(function).parameters, next(iter(call.values())).shape[1]
    if "cu_seqlens" not in parameters:
        return
    packed = {name: x[:1] if isinstance(x, Tensor) and x.dim() > 2 else x for name, x in call.items()}
    for name in ("cu_seqlens", "offsets"):
        for wrong in ([0, tokens], torch.tensor([0.0, tokens])):
            assert raised(function, {**packed, name: wrong}) == [name]
        with pytest.raises(InvalidArgument, match=f"^{function.__name__}: {name} must be offsets that begin at 0"):
            function(**packed, **{name: torch.tensor([0, tokens + 1])})
    if "cu_seqlens_cpu" in parameters:
        for wrong in (torch.tensor([0, 2, tokens]), torch.tensor([1, tokens]), "x"):
            with pytest.raises(InvalidArgument, match=f"^{function.__name__}: cu_seqlens_cpu must be a"):
                function(**packed, cu_seqlens=torch.tensor([0, tokens]), cu_seqlens_cpu=wrong)
        function(**packed, cu_seqlens=torch.tensor([0, tokens]), cu_seqlens_cpu=torch.tensor([0, tokens], dtype=torch.int32))


def swapped(call):
    """The same call with heads before tokens."""
    return {name: x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() > 2 else x for name, x in call.items()} | {"head_first": True}


CHECKS = (
    lambda function, call, state: refuses_wrong_tensors(function, call),
    lambda function, call, state: refuses_wrong_tensors(function, swapped(call)),
    lambda function, call, state: refuses_wrong_options(function, call),
    lambda function, call, state: refuses_wrong_offsets(function, call),
    lambda function, call, state: state is None or refuses_wrong_states(function, call, state),
)
