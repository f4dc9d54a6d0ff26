"""The environment with TensorFlow, Keras and JAX, which `make test` makes."""

import importlib.util
import os
import sys
from pathlib import Path

from environments import named_python


def tensorflow_python() -> Path:
    variable = "HVDTRAIN_TENSORFLOW_PYTHON"
    if not os.environ.get(variable) and importlib.util.find_spec("tensorflow") is not None:
        return Path(sys.executable)
    return named_python(variable, "TensorFlow")


def keras_variables(backend: str = "tensorflow") -> dict[str, str]:
    """Return variables with which Keras or TensorFlow write nothing of their own."""
    return {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "JAX_PLATFORMS": "cpu",
        # To compile takes far longer than all that is computed.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
