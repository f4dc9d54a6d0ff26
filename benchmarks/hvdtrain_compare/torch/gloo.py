"""The process group of strategies of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def with_gloo() -> Iterator[None]:
    """Make the default process group from the variables of this process; destroy it at the end."""
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
