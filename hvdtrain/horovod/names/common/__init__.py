"""`horovod.common`: what all frameworks share."""

from __future__ import annotations

from hvdtrain import errors as exceptions
from hvdtrain.core import elastic
from hvdtrain.core import process_set as process_sets
from hvdtrain.horovod.names.common import util

__all__ = ["elastic", "exceptions", "process_sets", "util"]
