"""Import hook for Horovod's module names: each is a second name of one of hvdtrain's modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hvdtrain.core.context import is_initialized
from hvdtrain.core.exits import install_plain_excepthook
from hvdtrain.errors import UsageError

__all__ = ["MODULES", "HorovodFinder"]

# The module for each name; most have the same name in hvdtrain.
_SAME = (
    *("keras", "keras.callbacks", "keras.elastic", "tensorflow", "tensorflow.compression"),
    *("tensorflow.elastic", "tensorflow.functions", "tensorflow.sync_batch_norm", "torch"),
    *("torch.compression", "torch.elastic", "torch.elastic.sampler", "torch.elastic.state"),
    *("torch.functions", "torch.optimizer", "torch.sync_batch_norm"),
)
MODULES = {f"horovod.{name}": f"hvdtrain.{name}" for name in _SAME} | {
    "horovod.common": "hvdtrain.horovod.names.common",
    "horovod.common.elastic": "hvdtrain.core.elastic",
    "horovod.common.exceptions": "hvdtrain.errors",
    "horovod.common.process_sets": "hvdtrain.core.process_set",
    "horovod.common.util": "hvdtrain.horovod.names.common.util",
    "horovod.runner": "hvdtrain.horovod.names.runner",
    # tf.keras is Keras.
    "horovod.tensorflow.keras": "hvdtrain.keras",
    "horovod.tensorflow.keras.callbacks": "hvdtrain.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hvdtrain.keras.elastic",
    # Scripts import anything from there: operations, rank(), Average.
    "horovod.tensorflow.mpi_ops": "hvdtrain.tensorflow",
    "horovod.torch.mpi_ops": "hvdtrain.torch",
}
MODULES = dict(sorted(MODULES.items()))

_LAUNCH = "start ranks with mpirun or `python -m hvdtrain run`"
# Advice for a name without a module, by one of its parts.
_INSTEAD = {"run": _LAUNCH, "runner": _LAUNCH}


class HorovodFinder(MetaPathFinder):
    """Finder for `import horovod.<name>`; must precede the finder that searches directories.

    That finder would load a module of hvdtrain a second time, under its other name.
    """

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module with that name."""
        name = self._package.__name__
        if not fullname.startswith(f"{name}.") or sys.modules.get(name) is not self._package:
            return None
        if fullname not in MODULES:
            # Without the name of the module, because Python would replace the message.
            raise ModuleNotFoundError(_refusal(fullname))
        if fullname.startswith("horovod.tensorflow.keras"):
            _require_keras_3(fullname)
        return ModuleSpec(fullname, _SameModule(MODULES[fullname]))


class _SameModule(Loader):
    """Loads an existing module under another name, and does not change it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new, empty module by the existing one."""
        sys.modules[module.__name__] = importlib.import_module(self._name)


def _require_keras_3(fullname: str) -> None:
    # As TensorFlow parses it.
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "")
    if legacy not in ("1", "true", "True"):
        return
    if not is_initialized():
        install_plain_excepthook()
    raise UsageError(
        f"TF_USE_LEGACY_KERAS={legacy} makes tf.keras Keras 2 (tf_keras), and {fullname} is for "
        "Keras 3: use DistributedOptimizer and broadcast_variables of horovod.tensorflow, which "
        "take optimizers and models of tf_keras, or unset the variable"
    )


def _refusal(fullname: str) -> str:
    package, _, _ = fullname.rpartition(".")
    there = [name for name in MODULES if name.rpartition(".")[0] == package]
    instead = next((_INSTEAD[part] for part in fullname.split(".") if part in _INSTEAD), None)
    return (
        f"hvdtrain answers for Horovod here, and has no {fullname}"
        + (f" ({instead})" if instead else "")
        + f"; it has {', '.join(there)}"
    )
