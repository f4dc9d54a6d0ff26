"""Where the repository, its tests, and what they import from each other are."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"
_HELPERS = TESTS / "helpers"
TRAINING = _HELPERS / "training"
# As pyproject.toml has them for pytest and mypy.
HELPERS = (
    _HELPERS,
    *(_HELPERS / name for name in ("devices", "exchanges", "launching", "training")),
)
