"""The interface of a strategy: what it needs, how it starts, and how it trains."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hvdtrain.errors import UsageError
from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.task import Place, Task


class Launch(Enum):
    """How the processes of a strategy are started."""

    MPI = "mpirun"
    PROCESSES = "processes with RANK, WORLD_SIZE and MASTER_ADDR, as torchrun starts them"
    ONE = "one process"


@dataclass(frozen=True)
class Need:
    """A package that a strategy needs."""

    module: str
    install: str

    def require(self) -> None:
        """Check that the module is installed, without importing it."""
        try:
            found = importlib.util.find_spec(self.module)
        except ModuleNotFoundError:  # of the package that it is part of
            found = None
        if found is None:
            package = self.module.partition(".")[0]
            raise UsageError(f"{package} is not installed: {self.install}")


TORCH = Need("torch", "pip install 'hvdtrain[torch]'")
KERAS = Need("keras", "pip install 'hvdtrain[keras]'")
TENSORFLOW = Need("tensorflow", "pip install 'hvdtrain[tensorflow]'")
JAX = Need("jax", "pip install jax")


@dataclass(frozen=True)
class Strategy:
    """A way to train on several processes."""

    name: str
    summary: str
    launch: Launch
    needs: tuple[Need, ...]
    code: str
    train: Callable[[Task, Place], RankResult]
    takes_variants: bool = False
    backend: str = ""
    helpers: tuple[str, ...] = ()

    @property
    def lines(self) -> int:
        """The number of lines that a user adds or changes; blank lines and comments are none."""
        lines = (line.strip() for line in self.code.splitlines())
        return sum(1 for line in lines if line and not line.startswith("#"))

    def processes(self, ranks: int) -> int:
        """Return the number of processes that train, for so many ranks."""
        return 1 if self.launch is Launch.ONE or self.helpers else ranks

    def roles(self, ranks: int) -> list[str]:
        """Return the role of each process in TF_CONFIG."""
        if not self.helpers:
            return ["worker"] * self.processes(ranks)
        return ["chief", *self.helpers, *["worker"] * ranks]
