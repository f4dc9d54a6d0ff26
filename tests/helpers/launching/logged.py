"""What hvdtrain logs while a function runs."""

import logging
from collections.abc import Callable


def logged(call: Callable[[], object], level: int = logging.WARNING) -> list[str]:
    """Call a function; return the messages of this level and above."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdtrain")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        call()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return lines


WEIGHTS_DIFFER = "weights differ between ranks"
