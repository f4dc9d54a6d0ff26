"""The trained parameters of a model in a row, as servers and workers exchange them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdtrain.errors import UsageError

__all__ = ["FlatParameters"]


class FlatParameters:
    """Copies of parameters and gradients in host memory.

    Args:
        parameters: trained parameters, of one type.

    Attributes:
        parameters: the parameters.
        sizes: number of elements of each.
        weights: memory for their values, one after the other, [n].
        gradients: memory for their gradients, [n].

    Raises:
        UsageError: there are none, or their types differ.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        types = sorted({str(parameter.dtype) for parameter in self.parameters})
        if len(types) != 1:
            raise UsageError(
                "a parameter server needs trained parameters of one type, got "
                f"{' and '.join(types) or 'no parameter'}"
            )
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.weights = torch.zeros(sum(self.sizes), dtype=self.parameters[0].dtype)
        self.gradients = torch.zeros_like(self.weights)

    def read_weights(self) -> None:
        """Copy the parameters to `weights` (local)."""
        for part, parameter in self._parts(self.weights):
            part.copy_(parameter.detach().reshape(-1))

    def write_weights(self) -> None:
        """Copy `weights` to the parameters (local)."""
        for part, parameter in self._parts(self.weights):
            parameter.detach().copy_(part.view(parameter.shape))

    def read_gradients(self) -> None:
        """Copy the gradients to `gradients`; a parameter without one counts as 0 (local)."""
        for part, parameter in self._parts(self.gradients):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.reshape(-1))

    def _parts(self, flat: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.nn.Parameter]]:
        return zip(flat.split(self.sizes), self.parameters, strict=True)
