"""What must fail on a rank."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raising(*kinds: type[BaseException], text: str = "") -> Iterator[None]:
    """Fail unless the block raises an error that is of all these kinds and says `text`."""
    raised: BaseException | None = None
    try:
        yield
    except BaseException as error:
        raised = error
    assert raised is not None, f"nothing raised, where {kinds} was expected"
    assert all(isinstance(raised, kind) for kind in kinds), repr(raised)
    assert text in str(raised), str(raised)
