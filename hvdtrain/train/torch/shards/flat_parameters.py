"""The trained parameters of a torch model in a row."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdtrain.train.parameter_server.row import ParameterRow


class FlatParameters(ParameterRow):
    """Copies of parameters and gradients in host memory."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        types = [str(parameter.dtype).removeprefix("torch.") for parameter in self.parameters]
        super().__init__([parameter.numel() for parameter in self.parameters], types)
        self._weights = torch.from_numpy(self.weights).split(self.sizes)
        self._gradients = torch.from_numpy(self.gradients).split(self.sizes)

    def read_weights(self) -> None:
        for part, parameter in zip(self._weights, self.parameters, strict=True):
            part.copy_(parameter.detach().reshape(-1))

    def write_weights(self) -> None:
        for part, parameter in zip(self._weights, self.parameters, strict=True):
            parameter.detach().copy_(part.view(parameter.shape))

    def read_gradients(self) -> None:
        for part, parameter in zip(self._gradients, self.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.reshape(-1))
