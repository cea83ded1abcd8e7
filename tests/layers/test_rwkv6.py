"""RWKV-6's mixers against their formulas, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import channel_mix, error, time_mix
from torch import Tensor

from penstock.layers import Mixer, RWKV6ChannelConfig, RWKV6Config, RWKV6State, ShiftState

C, H, n = 24, 3, 8
LENGTH = 70


@pytest.fixture(scope="module")
def mixers() -> tuple[Mixer, Mixer]:
    """All parameters differ from their initial values: zeros and ones would hide errors."""
    torch.manual_seed(1)
    mixers = RWKV6Config(n, mix_rank=5, decay_rank=6).build(C, 1, 3), RWKV6ChannelConfig(40).build(C, 1, 3)
    with torch.no_grad():
        for mixer in mixers:
            for parameter in mixer.parameters():
                parameter.add_(torch.randn_like(parameter) * (1 / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else 0.3))
    return mixers


def test_mixers_equal_their_formulas(mixers: tuple[Mixer, Mixer]) -> None:
    x = torch.randn(LENGTH, C, generator=torch.Generator().manual_seed(3))
    time, channel = ({name: p.double() for name, p in part.state_dict().items()} for part in mixers)
    p, S = torch.zeros(C).double(), torch.zeros(H, n, n).double()
    mixed, channels = [], []
    for one in x.double():
        y, S = time_mix(one, p, S, time)
        mixed.append(y)
        channels.append(channel_mix(one, p, channel))
        p = one
    y, after = mixers[0](x[None])
    assert error(y[0], torch.stack(mixed)) < 1e-5
    assert error(after.wkv[0], S) < 1e-5
    assert torch.equal(after.shift[0], x[-1])
    y, after = mixers[1](x[None])
    assert error(y[0], torch.stack(channels)) < 1e-5
    assert torch.equal(after.shift[0], x[-1])


def test_gradients_pass_gradcheck() -> None:
    torch.manual_seed(4)
    mixer = RWKV6Config(4, mix_rank=2, decay_rank=3).build(8, 1, 2).double()
    channel = RWKV6ChannelConfig(12).build(8, 1, 2).double()
    for parameter in [*mixer.parameters(), *channel.parameters()]:
        torch.nn.init.normal_(parameter, std=0.5)
    x, p, S = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(1, 5, 8), (1, 8), (1, 2, 4, 4)])

    def block(x: Tensor, p: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        y, state = mixer(x, RWKV6State(p, S))
        y, channel_state = channel(y, ShiftState(p))
        return y, *state, *channel_state

    assert torch.autograd.gradcheck(block, (x, p, S))
