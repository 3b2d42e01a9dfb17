"""Where the random numbers behind an agent's decisions come from."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sdar_utils.devices import upload


class Noise:
    """From torch's generator, as training wants them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.greedy = torch.tensor(False, device=device)

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, device=self.device)

    def normal(self, size: int) -> Tensor:
        return torch.randn(size, device=self.device)


class EpisodesNoise(Noise):
    """For episodes side by side, a row each: a stochastic one has a stream of its own, a greedy one gets medians.

    How many play together thus makes no difference. Medians are what makes an agent greedy: a Gaussian gives its mean,
    and a bit the likelier of its values.
    """

    def __init__(self, generators: list[np.random.Generator | None], device: torch.device):
        """A generator for each row; None is a greedy episode."""
        super().__init__(device)
        self.generators = generators
        self.greedy = torch.tensor([generator is None for generator in generators], device=device)
        self.asked: Sequence[int] = ()  # the rows that decide at this step: the other streams stay where they are

    def uniform(self, size: int) -> Tensor:
        return self.draw(np.random.Generator.random, 0.5, size)

    def normal(self, size: int) -> Tensor:
        return self.draw(np.random.Generator.standard_normal, 0.0, size)

    def draw(self, function: Callable[..., np.ndarray], median: float, size: int) -> Tensor:
        numbers = np.full((len(self.generators), size), median, np.float32)
        for row in self.asked:
            if (generator := self.generators[row]) is not None:
                numbers[row] = function(generator, size, np.float32)
        return upload(numbers, self.device)
