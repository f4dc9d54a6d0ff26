"""The backend that Keras runs on."""

from __future__ import annotations

import functools

import keras

from hvdtrain.errors import UsageError
from hvdtrain.keras.backends.reduction import ReductionBackend

_BACKENDS = ("tensorflow", "torch", "jax")


@functools.cache  # also keeps AutoGraph from rewriting this function
def current_backend() -> ReductionBackend:
    name = keras.backend.backend()
    require_backend(name)
    # Imported here, because only the framework of this backend may be installed.
    if name == "tensorflow":
        from hvdtrain.keras.backends.tensorflow_backend import TensorFlowBackend

        return TensorFlowBackend()
    if name == "torch":
        from hvdtrain.keras.backends.torch_backend import TorchBackend

        return TorchBackend()
    from hvdtrain.keras.backends.jax_backend import JaxBackend

    return JaxBackend()


def require_backend(name: str) -> None:
    if name not in _BACKENDS:
        raise UsageError(
            f"hvdtrain.keras works with Keras's backends {', '.join(_BACKENDS)}, found {name!r}: "
            "set KERAS_BACKEND to one of them"
        )
