"""`python -m hvdtrain` that kills itself at a moment of its saving: KILL="WAY:NUMBER:FOLDER".

- file: before it opens, names, links or removes a file in the folder for the NUMBERth time
- half: within its NUMBERth checkpoint, of which a part has been written
"""

import os
import signal
import sys
from itertools import count
from typing import Any

from hvdtrain.cli.main import main
from hvdtrain.train import checkpoints

# The files that a start writes are smaller, and each checkpoint is larger.
LEAST_BYTES = 100_000
_EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate")


def arrange() -> None:
    way, _, place = os.environ.pop("KILL", "").partition(":")
    number, _, folder = place.partition(":")
    moments = count(1)
    if way == "half":
        module: Any = checkpoints
        plain = module.write_tensors

        def write(file: Any, *content: Any) -> Any:
            return plain(_Half(file) if next(moments) == int(number) else file, *content)

        module.write_tensors = write
    if way == "file":

        def heard(event: str, details: tuple[Any, ...]) -> None:
            inside = event in _EVENTS and any(str(each).startswith(folder) for each in details)
            if inside and next(moments) == int(number):
                _die()

        sys.addaudithook(heard)


class _Half:
    """A file of a checkpoint that ends its process when a part has been written."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, LEAST_BYTES

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._left -= len(data)
        if self._left <= 0:
            self._file.flush()
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    arrange()
    main(sys.argv[1:])
