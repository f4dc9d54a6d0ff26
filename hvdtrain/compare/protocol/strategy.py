"""The interface of a strategy: what it needs, how it starts, and how it trains."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hvdtrain.compare.protocol.rank_file import RankResult
from hvdtrain.compare.protocol.task import Place, Task
from hvdtrain.errors import UsageError

__all__ = ["Launch", "Need", "Strategy"]


class Launch(Enum):
    """How the processes of a strategy are started."""

    MPI = "mpirun"
    PROCESSES = "processes with RANK, WORLD_SIZE and MASTER_ADDR, as torchrun starts them"
    ONE = "one process"


@dataclass(frozen=True)
class Need:
    """A package that a strategy needs.

    Attributes:
        module: module to import.
        install: command that installs it.
    """

    module: str
    install: str

    def require(self) -> None:
        """Import the module (local).

        Raises:
            UsageError: it is not installed; the error names the command.
        """
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            missing = (error.name or self.module).partition(".")[0]
            if missing != self.module.partition(".")[0]:
                raise
            raise UsageError(f"{missing} is not installed: {self.install}") from error


@dataclass(frozen=True)
class Strategy:
    """A way to train on several processes.

    Attributes:
        name: name on the command line.
        summary: what it does, in one line.
        launch: how its processes are started.
        needs: packages that it needs.
        code: lines that a user adds to a script for one process, or changes in it.
        train: trains on one process, together with the others, and returns what happened.
        takes_variants: whether a colon and a variant may follow the name.
    """

    name: str
    summary: str
    launch: Launch
    needs: tuple[Need, ...]
    code: str
    train: Callable[[Task, Place], RankResult]
    takes_variants: bool = False

    @property
    def lines(self) -> int:
        """The number of lines that a user adds or changes; blank lines and comments are none."""
        lines = (line.strip() for line in self.code.splitlines())
        return sum(1 for line in lines if line and not line.startswith("#"))

    def processes(self, ranks: int) -> int:
        """Return the number of processes for so many ranks."""
        return 1 if self.launch is Launch.ONE else ranks
