"""A shard of the weights on a server, with the recipe's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvdtrain.errors import UsageError
from hvdtrain.train.parameter_server.shards import Piece
from hvdtrain.train.parameter_server.states import Outline, State
from hvdtrain.train.parameter_server.wire import Flat

# Optimizers whose step for an element depends on no other element.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)

# Their states with one value for a whole parameter; all other tensors have one for each element.
_OF_PARAMETER = ("step", "mu_product", "eta", "mu")


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can step on parts of parameters."""
    if type(optimizer) not in _ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise UsageError(
            f"--strategy ps cannot use the recipe's optimizer {type(optimizer).__name__}: servers "
            f"step on parts of parameters, as torch's {names} can"
        )


class TorchShard:
    """A shard whose parameters are pieces of the model's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        pieces: Sequence[Piece],
        flat: torch.Tensor,
        set_rate: Callable[[torch.optim.Optimizer, int], None],
    ) -> None:
        self._optimizer, self._flat, self._set_rate = optimizer, flat, set_rate
        self._pieces = [
            (piece, torch.nn.Parameter(flat.narrow(0, piece.start, piece.count)))
            for piece in pieces
        ]
        own = {id(parameters[piece.parameter]): tensor for piece, tensor in self._pieces}
        for group in optimizer.param_groups:
            group["params"] = [own[id(p)] for p in group["params"] if id(p) in own]
        self._parameters = parameters

    @property
    def weights(self) -> Flat:
        """The current weights; steps change them in place."""
        array: Flat = self._flat.numpy()
        return array

    def step(self, gradient: Flat, number: int) -> None:
        """Step the optimizer; see Shard.step."""
        flat = torch.from_numpy(gradient)
        for piece, tensor in self._pieces:
            tensor.grad = flat.narrow(0, piece.start, piece.count)
        self._set_rate(self._optimizer, number)
        self._optimizer.step()

    def load_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the pieces' parts of the state of an optimizer of the whole parameters."""
        self._optimizer.state.clear()
        for piece, tensor in self._pieces:
            parameter = self._parameters[piece.parameter]
            for name, value in optimizer.state.get(parameter, {}).items():
                if _is_elementwise(name, value):
                    part = value.reshape(-1).narrow(0, piece.begin, piece.count)
                    value = part.to("cpu", copy=True)
                elif isinstance(value, torch.Tensor):
                    value = value.to("cpu", copy=True)
                self._optimizer.state[tensor][name] = value

    def outline(self) -> Outline:
        """Return each piece with its state."""
        return [
            (
                piece,
                {
                    name: value.numpy().dtype if _is_elementwise(name, value) else value
                    for name, value in self._optimizer.state.get(tensor, {}).items()
                },
            )
            for piece, tensor in self._pieces
        ]

    def write_state(self, name: str, flat: Flat) -> None:
        """Write an elementwise state of all pieces; see ShardState.write_state."""
        memory = torch.from_numpy(flat)
        for piece, tensor in self._pieces:
            value = self._optimizer.state.get(tensor, {}).get(name)
            if _is_elementwise(name, value):
                memory.narrow(0, piece.start, piece.count).copy_(value)


def load_states(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[State],
) -> None:
    """Overwrite the state of the optimizer of the whole parameters."""
    for parameter, state in zip(parameters, states, strict=True):
        for name, value in state.items():
            own = optimizer.state[parameter]
            if not isinstance(value, np.ndarray):
                own[name] = value
                continue
            whole = torch.from_numpy(value).view(parameter.shape)
            if name not in own:
                own[name] = torch.empty_like(
                    parameter,
                    dtype=whole.dtype,
                    memory_format=torch.contiguous_format,
                    requires_grad=False,
                )
            own[name].copy_(whole)


def _is_elementwise(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and name not in _OF_PARAMETER
