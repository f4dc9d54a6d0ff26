"""Errors in one line, with the user's own frame."""

import pytest

from hvdtrain.core.exits import own_frame

LOADER = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/lib/site-packages/torch/utils/data/_utils/worker.py", line 364, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/u/data.py", line 7, in __getitem__
    raise ValueError("no image 7")
ValueError: no image 7
"""
DYNAMO = """mat1 and mat2 shapes cannot be multiplied

from user code:
   File "/home/u/model.py", line 9, in forward
    return self.last(rows)

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace
"""
AUTOGRAPH = """in user code:

    File "/home/u/model.py", line 5, in call  *
        return tf.matmul(rows, self.kernel)

    ValueError: Dimensions must be equal, but are 3 and 4
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (LOADER, "/home/u/data.py:7 in __getitem__: ValueError: no image 7"),
        (
            DYNAMO,
            "/home/u/model.py:9 in forward: RuntimeError: mat1 and mat2 shapes cannot be "
            "multiplied Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace",
        ),
        (
            AUTOGRAPH,
            "/home/u/model.py:5 in call  *: ValueError: Dimensions must be equal, but are 3 and 4",
        ),
    ],
)
def test_an_error_that_tells_of_another_place(text: str, line: str) -> None:
    assert own_frame(RuntimeError(text)) == line
