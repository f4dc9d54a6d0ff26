"""The folder of a job's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch import session_folder as module
from hvdtrain.launch.session_folder import session_folder

BASE = "PRTE_MCA_prte_tmpdir_base"


def test_it_has_an_absolute_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    with session_folder({BASE: "base"}) as session:
        assert Path(session.folder).parent == tmp_path / "base"
    assert list(Path("base").iterdir()) == []


def test_without_a_shell_it_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SHELL", f"{tmp_path}/sh")
    before = set(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(UsageError, match=f"cannot start {tmp_path}/sh, "),
        session_folder({BASE: str(tmp_path)}),
    ):
        pass
    # Meanwhile what others have left may be collected, with its files: there are no more than then.
    assert set(os.listdir("/proc/self/fd")) <= before
    assert list(tmp_path.iterdir()) == []
