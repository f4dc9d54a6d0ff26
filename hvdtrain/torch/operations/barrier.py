"""Operations without tensors."""

from __future__ import annotations

from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.process_set import ProcessSet, channel_of, global_process_set
from hvdtrain.torch.tensors.dynamo import disable_compile

__all__ = ["barrier", "join"]


@disable_compile
@collective
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called it (collective)."""
    operations.barrier(channel_of(process_set))


@disable_compile
@collective
def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' reductions until all ranks have joined (collective).

    Args:
        device: accepted for compatibility with Horovod; it has no effect.

    Returns:
        The rank that joined last: one that missed none of the operations before, if there is one.
    """
    return operations.join()
