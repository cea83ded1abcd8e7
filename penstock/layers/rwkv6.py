"""The two mixers of an RWKV-6 ("Finch", x060) block, with the parameter names of its published checkpoints.

Both use the previous token: p is its input (the *shift state*), dx = p - x. TimeMix also has the state of the recurrence. Both
take and return a ``State``, so a sequence can be cut anywhere:

>>> mixer = TimeMix(hidden_size=16, head_size=8, mix_rank=4, decay_rank=4, layer=0, num_layers=2)
>>> x, state = torch.randn(1, 6, 16), State.zeros(1, 16, 8, like=torch.empty(0))
>>> whole, _ = mixer(x, state)
>>> first, state = mixer(x[:, :2], state)
>>> second, state = mixer(x[:, 2:], state)
>>> torch.allclose(torch.cat([first, second], 1), whole, atol=1e-6)
True

Source: Peng et al. 2024, arXiv 2404.05892, sections 3 and 4 and appendix (initialisation); the constants are from the
authors' training code, github.com/BlinkDL/RWKV-LM, ``RWKV-v5/src/model.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..recurrence import functional
from ..recurrence.declaration import state_dtype


class State(NamedTuple):
    """The state of one block for each of B sequences."""

    time_shift: Tensor
    """[B,C], the last input of TimeMix."""
    channel_shift: Tensor
    """[B,C], the last input of ChannelMix."""
    wkv: Tensor
    """[B,H,K,V], the state of the recurrence, float32 (float64 for float64 models)."""

    @classmethod
    def zeros(cls, batch: int, hidden_size: int, head_size: int, *, like: Tensor) -> State:
        """The state before the first token, on the device of ``like``; shift states have its dtype."""
        heads = hidden_size // head_size
        wkv = like.new_zeros(batch, heads, head_size, head_size, dtype=state_dtype(like.dtype))
        return cls(like.new_zeros(batch, hidden_size), like.new_zeros(batch, hidden_size), wkv)


class TimeMix(nn.Module):
    r"""Time mixing by the RWKV-6 recurrence.

    With five low-rank offsets :math:`\delta_i = \tanh((x + dx \cdot maa_x) W_1)_i W_{2,i}`, i in w, k, v, r, g in this order:

    .. math::
        x_i = x + dx (maa_i + \delta_i), \qquad r, k, v = W_r x_r, W_k x_k, W_v x_v, \qquad g = silu(W_g x_g)

        w = -\exp(time\_decay + \tanh(x_w D_1) D_2), \qquad y = W_o (GroupNorm_H(rwkv6(r, k, v, w, u)) \cdot g)

    w is a log decay (natural logarithm), computed in float32 for float16 and bfloat16 models; u is ``time_faaaa``.

    hidden_size : int
        C, a multiple of head_size; H = C / head_size.
    mix_rank, decay_rank : int
        M and D, the ranks of the offsets and of the decay. In published models 32 and 64; 64 and 128 for C >= 4096.
    layer, num_layers : int
        Index of the block and number of blocks; the initialisation depends on them.
    """

    def __init__(self, hidden_size: int, head_size: int, mix_rank: int, decay_rank: int, *, layer: int, num_layers: int) -> None:
        super().__init__()
        C, n = hidden_size, head_size
        deep = layer / max(num_layers - 1, 1)  # 0 in the first block, 1 in the last
        shallow = 1 - layer / num_layers  # 1 in the first block, nearly 0 in the last
        self.time_maa_x = nn.Parameter(1 - _ramp(C, shallow))
        self.time_maa_w = nn.Parameter(1 - _ramp(C, shallow))
        self.time_maa_k = nn.Parameter(1 - _ramp(C, shallow))
        self.time_maa_v = nn.Parameter(1 - _ramp(C, shallow) - 0.3 * deep)
        self.time_maa_r = nn.Parameter(1 - _ramp(C, shallow / 2))
        self.time_maa_g = nn.Parameter(1 - _ramp(C, shallow / 2))
        self.time_maa_w1 = nn.Parameter(torch.zeros(C, 5 * mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, mix_rank, C).uniform_(-0.01, 0.01))

        self.time_decay = nn.Parameter(-6 + 5 * _ramp(C, 0.7 + 1.3 * deep, last=1))
        self.time_decay_w1 = nn.Parameter(torch.zeros(C, decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, C).uniform_(-0.01, 0.01))
        zigzag = 0.1 * (torch.arange(1, C + 1) % 3 - 1)
        self.time_faaaa = nn.Parameter((deep * (1 - _ramp(C, 1, last=1)) + zigzag).view(C // n, n))

        self.receptance = _matrix(C, C, gain=1)
        self.key = _matrix(C, C, gain=0.1)
        self.value = _matrix(C, C, gain=1)
        self.gate = _matrix(C, C, gain=0.1)
        self.output = _matrix(C, C, gain=0)
        self.ln_x = nn.GroupNorm(C // n, C, eps=64e-5)  # 1e-5 * 8**2: the authors normalise x / 8
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / num_layers) ** 0.7)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map normed x [B,T,C], T at least 0, to y [B,T,C] and a new state. Differentiable."""
        previous, shift = _shifted(x, state.time_shift)
        r, k, v, w, gate = self._project(x, previous)
        output, wkv = functional.rwkv6(r, k, v, w, self.time_faaaa, initial_state=state.wkv, output_final_state=True)
        assert wkv is not None  # output_final_state=True
        return self._project_output(output, gate), state._replace(time_shift=shift, wkv=wkv)

    def step(self, x: Tensor, state: State) -> Tensor:
        """Map x [B,T,C], T from 1 to 16, to y [B,T,C] without gradients; ``state`` is updated **in place**."""
        previous, shift = _shifted(x, state.time_shift)
        r, k, v, w, gate = self._project(x, previous)
        output = functional.decode_step("rwkv6", r, k, v, w, self.time_faaaa, state=state.wkv)
        state.time_shift.copy_(shift)  # after the recurrence, which may raise; then nothing must change
        return self._project_output(output, gate)

    def _project(self, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """r, k, v and log decay w [B,T,H,n], gate [B,T,C]."""
        dx = previous - x
        hidden = torch.tanh((x + dx * self.time_maa_x) @ self.time_maa_w1)
        hidden = hidden.view(-1, *self.time_maa_w2.shape[:2]).transpose(0, 1)  # [5,BT,M]
        maa = torch.cat([self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g])  # [5,1,C]
        offsets = torch.baddbmm(maa, hidden, self.time_maa_w2).view(5, *x.shape)
        x_w, x_k, x_v, x_r, x_g = (torch.addcmul(x, dx, offset) for offset in offsets.unbind())

        decay = torch.tanh(x_w @ self.time_decay_w1) @ self.time_decay_w2
        dtype = state_dtype(decay.dtype)
        w = -torch.exp(self.time_decay.to(dtype) + decay.to(dtype))
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        gate = nn.functional.silu(self.gate(x_g))
        heads = *x.shape[:-1], *self.time_faaaa.shape
        return r.view(heads), k.view(heads), v.view(heads), w.view(heads), gate

    def _project_output(self, output: Tensor, gate: Tensor) -> Tensor:
        """Map the output of the recurrence [B,T,H,n] to y [B,T,C]."""
        normed = self.ln_x(output.reshape(-1, gate.shape[-1])).view(gate.shape)
        y: Tensor = self.output(normed * gate)
        return y


class ChannelMix(nn.Module):
    r"""Channel mixing; its only state is the previous token.

    .. math:: y = \sigma(W_r (x + dx \cdot maa_r)) \cdot W_v \, relu(W_k (x + dx \cdot maa_k))^2

    hidden_size, intermediate_size : int
        C and F, the width of the hidden layer; F is about 3.5 C in published models.
    layer, num_layers : int
        Index of the block and number of blocks; the initialisation depends on them.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, layer: int, num_layers: int) -> None:
        super().__init__()
        self.time_maa_k = nn.Parameter(1 - _ramp(hidden_size, 1 - layer / num_layers))
        self.time_maa_r = nn.Parameter(1 - _ramp(hidden_size, 1 - layer / num_layers))
        self.key = _matrix(hidden_size, intermediate_size, gain=1)
        self.receptance = _matrix(hidden_size, hidden_size, gain=0)
        self.value = _matrix(intermediate_size, hidden_size, gain=0)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Map normed x [B,T,C], T at least 0, to y [B,T,C] and a new state. Differentiable."""
        previous, shift = _shifted(x, state.channel_shift)
        return self._mix(x, previous), state._replace(channel_shift=shift)

    def step(self, x: Tensor, state: State) -> Tensor:
        """Map x to y without gradients; ``state`` is updated **in place**."""
        previous, shift = _shifted(x, state.channel_shift)
        y = self._mix(x, previous)
        state.channel_shift.copy_(shift)
        return y

    def _mix(self, x: Tensor, previous: Tensor) -> Tensor:
        dx = previous - x
        k = torch.relu(self.key(torch.addcmul(x, dx, self.time_maa_k))).square()
        y: Tensor = torch.sigmoid(self.receptance(torch.addcmul(x, dx, self.time_maa_r))) * self.value(k)
        return y


def _shifted(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The previous token of every token of x [B,T,C], with ``shift`` [B,C] before the first; and the last token [B,C]."""
    tokens = torch.cat([shift.unsqueeze(1), x], 1)
    return tokens[:, :-1], tokens[:, -1].clone()  # a view would keep all tokens in memory


def _ramp(hidden_size: int, power: float, last: int = 0) -> Tensor:
    """(c / C) ** power for c from 0 to C - 1: [1,1,C]; with ``last`` = 1, (c / (C - 1)) ** power, which ends at 1."""
    return (torch.arange(hidden_size) / max(hidden_size - last, 1)).pow(power).view(1, 1, hidden_size)


def _matrix(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear map without bias: orthogonal times gain, or 0 for gain = 0, so that a new block is the identity."""
    linear = nn.Linear(inputs, outputs, bias=False)
    if gain == 0:
        nn.init.zeros_(linear.weight)
    else:
        nn.init.orthogonal_(linear.weight, gain)
    return linear
