"""Text without the passwords in its addresses."""

from __future__ import annotations

import re

# Greedy, because a password may hold a slash or an @ itself.
_USER = re.compile(r"(?<=://)\S*@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|passw|pwd|secret|token)[^=&\s]*=)[^&\s]+", re.IGNORECASE)


def masked(text: str) -> str:
    """Replace user and password of each address, and passwords in its query, by stars.

    scheme://user:password@host?token=x becomes scheme://***@host?token=***
    """
    return _QUERY.sub(r"\1***", _USER.sub("***@", text))


def one_line(error: Exception) -> str:
    """Return the first line of an exception's message, masked."""
    return masked(str(error).strip().partition("\n")[0] or type(error).__name__)
