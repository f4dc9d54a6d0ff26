"""Which of Horovod's names are refused, and how."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.horovod.names.finder import HorovodFinder


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> HorovodFinder:
    package = ModuleType("horovod")
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return HorovodFinder(package)


@pytest.mark.parametrize("name", ["horovod.tensorflow.keras", "horovod.tensorflow.keras.callbacks"])
def test_keras_2_is_refused_where_keras_3_is_meant(
    name: str, finder: HorovodFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    with pytest.raises(UsageError, match=f"TF_USE_LEGACY_KERAS=1 .* {name} is for Keras 3"):
        finder.find_spec(name, None)
    assert finder.find_spec("horovod.keras", None) is not None  # which is Keras 3 in any case
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    assert finder.find_spec(name, None) is not None


def test_names_that_nothing_answers_say_what_there_is(finder: HorovodFinder) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"it has .*horovod\.tensorflow\.elastic"):
        finder.find_spec("horovod.tensorflow.nonsense", None)
