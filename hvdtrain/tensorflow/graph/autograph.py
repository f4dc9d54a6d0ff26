"""What AutoGraph leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

__all__ = ["unconverted"]

F = TypeVar("F", bound=Callable[..., object])


def unconverted(function: F) -> F:
    """Keep AutoGraph from rewriting a function, and what it calls, inside the user's."""
    kept: F = tf.autograph.experimental.do_not_convert(function)
    return kept
