"""Which ranks go on where some take others for dead that are not, as without connections."""

from __future__ import annotations

import time
from contextlib import suppress
from hashlib import blake2b

from mpi4py import MPI

from hvdtrain.errors import ExcludedError
from hvdtrain.topology import format_ranks

# How long the smaller side lets others be first.
_MINORITY_SECONDS = 0.3


def require_succession(key: str, before: MPI.Intracomm, left: MPI.Intracomm) -> None:
    """Check that no other ranks go on in the place of these (on each of them).

    Where connections are closed and nobody has ended, each side takes the other one for dead. The
    side of which a rank is the first to publish it with mpirun goes on; ranks of a minority wait
    before they do. Where nothing can be published, no side is excluded.
    """
    if left.size == before.size:
        return
    ranks = left.Get_group().Translate_ranks(None, before.Get_group())
    own = blake2b(" ".join(map(str, ranks)).encode(), digest_size=16).hexdigest()
    service = f"hvdtrain-{key}"
    if 2 * left.size < before.size:
        time.sleep(_MINORITY_SECONDS)
    with suppress(MPI.Exception):  # another one was first
        MPI.Publish_name(service, own)
    chosen = own
    with suppress(MPI.Exception):
        chosen = MPI.Lookup_name(service)
    if chosen != own:
        raise ExcludedError(
            f"[rank {before.rank}/{before.size}] connections to other ranks were closed, and they "
            f"went on without {format_ranks(ranks)}: this process ends"
        )
