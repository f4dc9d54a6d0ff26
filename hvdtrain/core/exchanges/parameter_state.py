"""What an exchange keeps of each parameter from step to step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hvdtrain.arrays import Array, HostArray, copy, like, to_host, zeros_like
from hvdtrain.core.gradients.exchange import FilledBucket


class ParameterState:
    """One array for each parameter, initially zeros, on the device of its bucket.

    Parameters are known by their names, because a plan that is made again, e.g. after a layer was
    unfrozen, gives them other indices. Arrays that are put during a step take effect at its end,
    and only if it is valid. `quantity` says in checkpoints what they are, without a dot.
    """

    def __init__(self, quantity: str) -> None:
        self._quantity = quantity
        self._arrays: dict[str, Array] = {}
        self._new: dict[str, Array] = {}
        self._loaded: dict[str, HostArray] = {}

    def holds(self, name: str) -> bool:
        """Return whether the array of a parameter was ever put or loaded."""
        return name in self._arrays or name in self._loaded

    def get(self, name: str, model: Array) -> Array:
        """Return the array of a parameter; a new one has the shape, dtype and device of `model`."""
        if name in self._loaded:
            self._arrays[name] = like(self._loaded.pop(name), model)
        elif name not in self._arrays:
            self._arrays[name] = zeros_like(model)
        return self._arrays[name]

    def put(self, name: str, array: Array) -> None:
        """Replace the array of a parameter when the step ends; do not modify it afterwards."""
        self._new[name] = array

    def keep(self, bucket: FilledBucket) -> None:
        """Replace the arrays of a bucket's parameters by copies of their elements, at once."""
        self._arrays |= {part.name: copy(part.array) for part in bucket.parts}

    def end(self, keep: bool = True, unused: Collection[str] = ()) -> None:
        """Accept the arrays that were put during a valid step, but not of `unused` parameters."""
        if keep:
            self._arrays |= {n: array for n, array in self._new.items() if n not in unused}
        self._new = {}

    def arrays(self) -> dict[str, HostArray]:
        """Return copies of all arrays by name, for a checkpoint."""
        kept = self._loaded | {name: to_host(array) for name, array in self._arrays.items()}
        return {f"{self._quantity}.{name}": array for name, array in kept.items()}

    def load(self, arrays: Mapping[str, HostArray]) -> None:
        """Restore arrays that arrays() has returned; those of other quantities are ignored."""
        self._arrays, self._new, self._loaded = {}, {}, {}
        for key, array in arrays.items():
            quantity, _, name = key.partition(".")
            if quantity == self._quantity:
                self._loaded[name] = array
