"""Functions and methods of one name are told apart; where that is not certain nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hvdtrain_lint.check import check_script
from lint_cases import DDP

# Two methods of one name, of which one, the last in the text, tells rank 0 from the others.
TESTS = """
class Options:
    def first(self):
        return self.kind == "first"

class Log:
    def first(self):
        return rank == 0
"""
# Two methods of one name, of which the first communicates on the ranks that it is told to.
JOBS = """
class Saver:
    def run(self, chosen):
        if chosen:
            dist.barrier()  # perhaps

class Printer:
    def run(self, chosen):
        if chosen:
            print(x)
"""
FOUND = [
    TESTS + "log = Log()\nif log.first():\n    dist.barrier()  # here\n",
    TESTS + "if Log().first():\n    dist.barrier()  # here\n",
    # Where no other class has the name, the owner may be a part of another file.
    "class Log:\n    def first(self):\n        return rank == 0\n"
    "def run(log):\n    if log.first():\n        dist.barrier()  # here\n",
    JOBS.replace("perhaps", "here") + "Saver().run(rank == 0)\nPrinter().run(step == 0)\n",
    # A function inside another one, and one of its name outside.
    "def first():\n    return step == 0\ndef run():\n    def first():\n        return rank == 0\n"
    "    if first():\n        dist.barrier()  # here\n",
    # The class of a method may be named, which then gets `self` as an argument.
    "class Base:\n    def __init__(self, chosen):\n        if chosen:\n"
    "            dist.barrier()  # here\n"
    "class Other(Base):\n    def __init__(self):\n        Base.__init__(self, rank == 0)\n",
]
LEFT_ALONE = [
    TESTS + "options = Options()\nif options.first():\n    dist.barrier()\n",
    TESTS + "def run(any):\n    if any.first():\n        dist.barrier()\n",
    TESTS + "def first():\n    return step == 0\nif first():\n    dist.barrier()\n",
    TESTS + "import other\nif other.first():\n    dist.barrier()\n",
    TESTS + "from other import first\nif first():\n    dist.barrier()\n",
    JOBS + "Printer().run(rank == 0)\n",
    JOBS + "def each(job):\n    job.run(rank == 0)\n",
    JOBS + "import other\nother.run(rank == 0)\nother.Job().run(rank == 0)\n",
    JOBS + "def run(chosen):\n    print(chosen)\nrun(rank == 0)\n",
    "def first():\n    return rank == 0\ndef run():\n    def first():\n        return step == 0\n"
    "    if first():\n        dist.barrier()\n",
]


def found(folder: Path, text: str) -> list[int]:
    """Return the lines in which the lint finds a collective operation of some ranks."""
    path = folder / "script.py"
    path.write_text(text)
    return [finding.line for finding in check_script(path) if finding.code == "HVD101"]


@pytest.mark.parametrize("rest", FOUND)
def test_the_method_of_the_right_class_is_found(tmp_path: Path, rest: str) -> None:
    text = DDP + rest
    here = [number for number, line in enumerate(text.splitlines(), 1) if "# here" in line]
    assert found(tmp_path, text) == here


@pytest.mark.parametrize("rest", LEFT_ALONE)
def test_methods_of_other_classes_are_left_alone(tmp_path: Path, rest: str) -> None:
    assert found(tmp_path, DDP + rest) == []
