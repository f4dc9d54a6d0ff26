"""Options for how ranks train one model together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import at_least, one_of
from hvdtrain.train.options.declare import OptionGroup, option

__all__ = ["ParameterServer", "StrategyOptions", "require_strategy_has"]

ALLREDUCE, PARAMETER_SERVER = "allreduce", "ps"
ASYNC, SYNC = "async", "sync"


@dataclass(frozen=True)
class ParameterServer:
    """The options of the parameter server.

    Attributes:
        servers: number of ranks that hold the weights: the last ones of the world.
        mode: "async": each gradient is an update; "sync": the mean of a round is one.
        staleness: of async: rounds that the fastest worker may be ahead of the slowest one.
        backup: of sync: workers whose gradients a round does not wait for.
    """

    servers: int = 1
    mode: str = ASYNC
    staleness: int = 4
    backup: int = 0

    @property
    def is_async(self) -> bool:
        """Whether each gradient is an update of its own."""
        return self.mode == ASYNC


def parse_strategy(label: str, text: str) -> ParameterServer | None:
    """Return the parameter server that a text such as "ps:servers=2,mode=sync" describes.

    Args:
        label: label of the option.
        text: "allreduce", or "ps" with options.

    Returns:
        None for all-reduce.

    Raises:
        UsageError: the text describes no strategy.
    """
    if text == ALLREDUCE:
        return None
    name, _, given = text.partition(":")
    if name != PARAMETER_SERVER:
        raise UsageError(f"{label} must be {ALLREDUCE} or {PARAMETER_SERVER}, got {text!r}")
    values = _parse_values(f"{label} {text}", given)
    made = ParameterServer(**values)
    _check(f"{label} {text}", made, values)
    return made


def _parse_values(label: str, given: str) -> dict[str, Any]:
    known = {one.name: one.default for one in fields(ParameterServer)}
    values: dict[str, Any] = {}
    for pair in filter(None, given.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            names = ", ".join(known)
            raise UsageError(f"{label}: expected key=value with one of {names}, got {pair!r}")
        if key in values:
            raise UsageError(f"{label}: {key} is given twice")
        values[key] = value if isinstance(known[key], str) else _whole(f"{label}: {key}", value)
    return values


def _whole(label: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{label} must be a whole number, got {value!r}") from None


def _check(label: str, made: ParameterServer, given: Mapping[str, Any]) -> None:
    at_least(1)(f"{label}: servers", made.servers)
    one_of((ASYNC, SYNC))(f"{label}: mode", made.mode)
    at_least(0)(f"{label}: staleness", made.staleness)
    at_least(0)(f"{label}: backup", made.backup)
    other = "backup" if made.is_async else "staleness"
    if other in given:
        raise UsageError(f"{label}: {other} is no option of mode={made.mode}: leave it out")
    if made.backup and made.servers > 1:
        raise UsageError(
            f"{label}: backup needs servers=1: several servers could count different gradients"
        )


def _check_strategy(label: str, text: str) -> None:
    parse_strategy(label, text)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(OptionGroup):
    """Options for how ranks train one model together."""

    title = "Strategy"

    strategy: str = option(
        ALLREDUCE,
        "allreduce, or a parameter server as ps:servers=1,mode=async,staleness=4, see "
        "docs/exchanges/parameter-server.md.",
        metavar="NAME[:KEY=VALUE,...]",
        check=_check_strategy,
    )

    @property
    def parameter_server(self) -> ParameterServer | None:
        """The options of the parameter server; None: ranks all-reduce."""
        return parse_strategy("--strategy", self.strategy)

    def worker_count(self, size: int) -> int:
        """Return how many of `size` ranks compute gradients, at least 1."""
        settings = self.parameter_server
        return size if settings is None else max(1, size - settings.servers)


# Options that a parameter server does not have: name, values (empty: all but the default), reason.
_REFUSED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("optimizer", ("lars", "lamb"), "servers hold parts of layers, and cannot compute their norms"),
    ("clip_norm", (), "no rank has the whole reduced gradient"),
    ("ema", (), "servers do not average weights"),
    ("amp", ("fp16",), "servers do not agree on a loss scale"),
    ("virtual_shards", (), "gradients are added in the order of arrival"),
    ("non_finite", ("skip",), "servers do not agree on skipping a step"),
    ("engine", ("local", "gloo", "nccl", "horovod"), "only mpi has messages between two ranks"),
)


def require_strategy_has(strategy: str, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Check that the strategy supports the options.

    Args:
        strategy: value of the option.
        values: value and default of each option by name.

    Raises:
        UsageError: it does not support one.
    """
    if strategy == ALLREDUCE:
        return
    for name, refused, reason in _REFUSED:
        value, default = values[name]
        if value in refused or (not refused and value != default):
            raise UsageError(
                f"--{name.replace('_', '-')} {value} does not go with --strategy {strategy}: "
                f"{reason}"
            )
