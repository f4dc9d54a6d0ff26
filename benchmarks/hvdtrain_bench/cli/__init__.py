"""`hvdtrain bench`: compare hvdtrain with its peers, and predict how it scales."""

from __future__ import annotations

from hvdtrain_bench.cli.commands import command

__all__ = ["command"]
