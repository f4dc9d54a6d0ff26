"""The optimizer's state, which moves between the user's optimizer and memory of the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdtrain.collective import collective
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.sharding.segments import Quantity, Segment
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.segment_optimizer import quantities_of
from hvdtrain.torch.sharding.segment_steps import SegmentSteps
from hvdtrain.torch.sharding.state_memory import StateMemory
from hvdtrain.torch.tensors.parameters import parameters_of


class SharedState:
    """State that is either in memory which all ranks of the node can read, or with the user."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        self._optimizer, self._buckets, self._slices = optimizer, buckets, slices
        self._parameters = [parameter for _, parameter in buckets.named]
        self._index = {id(p): index for index, p in enumerate(self._parameters)}
        self.memory: StateMemory | None = None
        self._given = False

    @property
    def given(self) -> bool:
        """Whether the state is in the user's optimizer, so that the next step takes it."""
        loaded = any(parameter in self._optimizer.state for parameter in self._parameters)
        return self.memory is None or self._given or loaded

    @collective
    def allocate(self, segments: Sequence[Sequence[Segment]]) -> None:
        """Allocate memory for what the optimizer keeps."""
        quantities = self._quantities()
        self.memory = StateMemory(self._buckets.plan.specs, segments, quantities)
        name = f"of the optimizer of {self._buckets.reducer.name}"
        memory = self._buckets.channel.run(AllocateMemory(self.memory.nbytes, name))
        copies = self._slices.copies(memory)
        if copies is None:
            raise RuntimeError(
                f"sharded=True: {self.memory.nbytes >> 10:,} KiB for the optimizer's state cannot "
                "be shared on this node: free memory, or use sharded=False "
                "(in train --no-shard-optimizer)"
            )
        self.memory.use(copies, self._slices.number)

    def _quantities(self) -> Sequence[Mapping[str, Quantity]]:
        """Return what the optimizer keeps for each parameter, the same on all ranks."""
        found: dict[int, Mapping[str, Quantity]] = {}
        for group in self._optimizer.param_groups:
            known: dict[object, Mapping[str, Quantity]] = {}
            for parameter in group["params"]:
                index = self._index.get(id(parameter))
                if index is None:
                    continue
                key = (parameter.dtype, tuple(self._optimizer.state.get(parameter, ())))
                if key not in known:
                    known[key] = quantities_of(self._optimizer, group, parameter)
                found[index] = known[key]
        return [found.get(index, {}) for index in range(len(self._parameters))]

    def take(self, steps: SegmentSteps) -> None:
        """Move the state from the user's optimizer into the memory."""
        assert self.memory is not None
        self.memory.clear()
        parts = {}
        for index, segment in steps.owned.items():
            entry = self._optimizer.state.get(self._parameters[index])
            if entry is not None:
                parts[index] = self.memory.cut(segment, entry)
                self.memory.keep(index, parts[index])
        steps.use_state(parts)
        self.withdraw()

    def withdraw(self) -> None:
        """Remove the state from the user's optimizer, because it is in the memory, too."""
        for parameter in self._parameters:
            self._optimizer.state.pop(parameter, None)
        self._given = False

    def give_back(self) -> None:
        """Move the whole state into the user's optimizer, until the next step."""
        if self.memory is None or self.given:
            return
        self._given = True
        for parameter in parameters_of(self._optimizer):
            index = self._index.get(id(parameter))
            entry = None if index is None else self.memory.read(index)
            if entry:
                self._optimizer.state[parameter] = entry

    def discard(self) -> None:
        """Take the state from the user's optimizer in the next step, even if empty."""
        self._given = True
