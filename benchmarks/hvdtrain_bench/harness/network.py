"""What this host has sent, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/net/dev")
_SENT = 8  # eight numbers of what was received come first


def sent_bytes(loopback: bool) -> int:
    """Return the bytes that the network cards have sent, or the loopback interface; 0 without."""
    try:
        lines = _COUNTERS.read_text(encoding="utf-8").splitlines()[2:]
    except OSError:
        return 0
    cards = (line.split(":", 1) for line in lines)
    return sum(
        int(counts.split()[_SENT]) for name, counts in cards if (name.strip() == "lo") == loopback
    )
