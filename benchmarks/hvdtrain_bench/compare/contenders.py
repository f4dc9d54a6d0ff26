"""The contenders that --with names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.advice import did_you_mean
from hvdtrain.errors import UsageError
from hvdtrain_bench.compare.strategies import REFERENCES, STRATEGIES, Strategy


@dataclass(frozen=True)
class StrategyContender:
    """A strategy that takes part, under a name of its own."""

    label: str
    title: str
    strategy: Strategy
    variant: str = ""
    python: str | None = None


def reference(framework: str) -> StrategyContender:
    """Return the contender that the weights of the others are compared with."""
    return StrategyContender("one process", "one process", REFERENCES[framework])


def parse_contenders(
    texts: Sequence[str], pythons: Mapping[str, str], framework: str
) -> list[StrategyContender]:
    """Return the contenders in the order in which they are named."""
    known = STRATEGIES[framework]
    titles = [title for text in texts for title in _names(text, known)]
    seen: Counter[str] = Counter()
    found = []
    for title in titles:
        seen[title] += 1
        label = title if seen[title] == 1 else f"{title} ({seen[title]})"
        name, _, variant = title.partition(":")
        strategy = _strategy(name, known, framework)
        if variant and not strategy.takes_variants:
            raise UsageError(f"--with {title}: {name} has no variants: leave out ':{variant}'")
        found.append(StrategyContender(label, title, strategy, variant, pythons.get(name)))
    for name in pythons:
        if all(contender.strategy.name != name for contender in found):
            raise UsageError(f"--python {name}={pythons[name]}: --with does not name {name}")
    return found


def _names(text: str, known: Mapping[str, Strategy]) -> list[str]:
    """Split at commas, but for those between the options of an exchange, which have an =."""
    names: list[str] = []
    for part in text.split(","):
        word = part.strip()
        if names and "=" in word and word.partition(":")[0] not in known:
            names[-1] += f",{word}"
        else:
            names.append(word)
    return names


def _strategy(name: str, known: Mapping[str, Strategy], framework: str) -> Strategy:
    if name in known:
        return known[name]
    near = did_you_mean(name, list(known))
    raise UsageError(
        f"--with {name!r}: no such strategy{near or ':'} with --framework {framework} choose from "
        f"{', '.join(known)}"
    )
