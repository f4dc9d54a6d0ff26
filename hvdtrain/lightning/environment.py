"""What Lightning asks of the ranks that a launcher has started."""

from __future__ import annotations

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.lightning.library import ClusterEnvironment


class HvdEnvironment(ClusterEnvironment):
    """Ranks and sizes as `init()` found them."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher has started the ranks: always."""
        return True

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return context.current().topology.hostnames[0]

    @property
    def main_port(self) -> int:
        """No port: hvdtrain's ranks have met already."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return whether `init()` was called."""
        return hvd.is_initialized()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Change nothing: the launcher has determined the size."""

    def global_rank(self) -> int:
        """Return this rank."""
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Change nothing: the launcher has determined the rank."""

    def local_rank(self) -> int:
        """Return the number of this rank on its node."""
        return hvd.local_rank()

    def node_rank(self) -> int:
        """Return the number of the node."""
        return hvd.cross_rank()
