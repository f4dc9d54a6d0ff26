"""What is refused in one line, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hvdtrain.errors import UsageError


@contextmanager
def refused(
    *words: str,
    kind: type[Exception] = UsageError,
    match: str | None = None,
    start: str = "",
    most: int = 1000,
) -> Iterator[None]:
    """Fail unless the block raises an error of one line of less than `most` letters, with words."""
    with pytest.raises(kind, match=match) as refusal:
        yield
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < most
    assert message.startswith(start), message
    for word in words:
        assert word in message
