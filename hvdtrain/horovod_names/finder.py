"""Finds modules by Horovod's names: each is one of hvdtrain's, under both names the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MODULES", "HorovodFinder"]

# Which module answers a name.
MODULES = {
    "horovod.common": "hvdtrain.horovod_names.common",
    "horovod.common.elastic": "hvdtrain.core.elastic",
    "horovod.common.exceptions": "hvdtrain.errors",
    "horovod.common.process_sets": "hvdtrain.core.process_set",
    "horovod.common.util": "hvdtrain.horovod_names.common.util",
    "horovod.tensorflow": "hvdtrain.tensorflow",
    "horovod.tensorflow.compression": "hvdtrain.tensorflow.compression",
    "horovod.tensorflow.functions": "hvdtrain.tensorflow.functions",
    # Scripts take anything from there: operations, rank(), Average.
    "horovod.tensorflow.mpi_ops": "hvdtrain.tensorflow",
    "horovod.tensorflow.sync_batch_norm": "hvdtrain.tensorflow.sync_batch_norm",
    "horovod.torch": "hvdtrain.torch",
    "horovod.torch.compression": "hvdtrain.torch.compression",
    "horovod.torch.elastic": "hvdtrain.torch.elastic",
    "horovod.torch.elastic.sampler": "hvdtrain.torch.elastic.sampler",
    "horovod.torch.elastic.state": "hvdtrain.torch.elastic.state",
    "horovod.torch.functions": "hvdtrain.torch.functions",
    "horovod.torch.mpi_ops": "hvdtrain.torch",
    "horovod.torch.optimizer": "hvdtrain.torch.optimizer",
    "horovod.torch.sync_batch_norm": "hvdtrain.torch.sync_batch_norm",
}

_NO_KERAS = "Keras is not supported yet, but its optimizers are in hvdtrain.tensorflow"
_LAUNCH = "start ranks with mpirun or `python -m hvdtrain run`"
# What to say of a name that nothing answers, by one of its parts.
_INSTEAD = {"keras": _NO_KERAS, "run": _LAUNCH, "runner": _LAUNCH}


class HorovodFinder(MetaPathFinder):
    """Answers `import horovod.<name>`; must come before the finder that looks into folders.

    That one would load a module of hvdtrain a second time, under its other name.

    Args:
        package: the module `horovod`; without it under that name, an installed Horovod answers.
    """

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return how to load a module of that name.

        Raises:
            ModuleNotFoundError: hvdtrain has nothing of that name; says what it has.
        """
        name = self._package.__name__
        if not fullname.startswith(f"{name}.") or sys.modules.get(name) is not self._package:
            return None
        if fullname not in MODULES:
            # Without the name of the module: else Python hides this behind words of its own.
            raise ModuleNotFoundError(_refusal(fullname))
        return ModuleSpec(fullname, _SameModule(MODULES[fullname]))


class _SameModule(Loader):
    """Loads a module that has another name, and leaves it as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        """Put the other module into the place of the new, empty one."""
        sys.modules[module.__name__] = importlib.import_module(self._name)


def _refusal(fullname: str) -> str:
    package, _, _ = fullname.rpartition(".")
    there = [name for name in MODULES if name.rpartition(".")[0] == package]
    instead = next((_INSTEAD[part] for part in fullname.split(".") if part in _INSTEAD), None)
    return (
        f"hvdtrain answers for Horovod here, and has no {fullname}"
        + (f" ({instead})" if instead else "")
        + f"; it has {', '.join(there)}"
    )
