"""A mixer as a user of the package writes one: a linear map of the mean of the last inputs."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from penstock.layers import Mixer, MixerConfig, Sequences, register


@register
@dataclass(frozen=True)
class WindowMeanConfig(MixerConfig):
    kind = "mean_of_inputs"
    size: int

    def build(self, hidden_size: int, layer: int = 0, num_layers: int = 1) -> "WindowMean":
        return WindowMean(self, hidden_size)


class WindowMeanState(NamedTuple):
    tail: Tensor
    """[N,size-1,C], the last inputs."""


class WindowMean(Mixer):
    def __init__(self, config: WindowMeanConfig, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.config = config
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)

    def initial_state(self, count: int, like: Tensor, max_length: int | None = None) -> WindowMeanState:
        return WindowMeanState(like.new_zeros(count, self.config.size - 1, self.hidden_size))

    def mix(self, x: Tensor, state: WindowMeanState, sequences: Sequences) -> tuple[Tensor, WindowMeanState]:
        rows, of_tokens, tail = sequences.extended(x, sequences.read(state.tail))
        windows = rows.shape[1] - self.config.size + 1
        total = sum(rows[:, n : n + windows] for n in range(self.config.size))
        return self.output(of_tokens(total / self.config.size)), WindowMeanState(tail)
