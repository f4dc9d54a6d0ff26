"""A folder for the files of one job."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from hvdtrain.errors import UsageError

__all__ = ["SESSION", "session_folder"]

# Where Open MPI 5 keeps the files of its jobs, and those of one on this host.
_SESSIONS, SESSION = "PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"


def session_folder(environ: Mapping[str, str]) -> tempfile.TemporaryDirectory[str]:
    """Make the folder, which goes with its block.

    An mpirun that is killed leaves files named by its process number, on which a later one with
    that number fails: each has its own place.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        return tempfile.TemporaryDirectory(
            prefix="hvdtrain-run-", dir=environ.get(_SESSIONS), ignore_cleanup_errors=True
        )
    except OSError as error:
        raise UsageError(f"cannot make a folder: {error}") from None
