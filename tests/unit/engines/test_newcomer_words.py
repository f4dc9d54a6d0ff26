"""How a rank that joins is started: the command line of the ranks that are there."""

import mpi4py
import pytest

from hvdtrain.errors import HvdtrainError

mpi4py.rc.initialize = False  # the module below imports MPI
from hvdtrain.engines.mpi.joining import program_words  # noqa: E402

NEWCOMER = ["-m", "hvdtrain.engines.mpi.newcomer"]


@pytest.mark.parametrize(
    ("line", "options", "program"),
    [
        *(("script.py -m x", "", "script.py -m x"), ("-m hvdtrain train", "", "-m hvdtrain train")),
        ("-u -W error -P script.py", "-u -W error -P", "script.py"),
        *(("-um hvdtrain", "-u", "-m hvdtrain"), ("-mhvdtrain train", "", "-m hvdtrain train")),
        ("-X dev -Bmhvdtrain", "-X dev -B", "-m hvdtrain"),
        ("-Wmodule script.py", "-Wmodule", "script.py"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_options_stand_before_the_program(
    line: str, options: str, program: str, joined: bool
) -> None:
    """Also on a rank that has joined itself."""
    words = ["python", *line.split()]
    if joined:
        words = ["python", *options.split(), *NEWCOMER, *program.split()]
    assert program_words(words) == (options.split(), program.split())


@pytest.mark.parametrize("word", ["-c", "-"])
def test_a_program_without_a_file_is_refused(word: str) -> None:
    with pytest.raises(HvdtrainError, match="put the program into a file"):
        program_words(["python", "-u", word])
