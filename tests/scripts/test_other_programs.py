"""Programs of other libraries, as tutorials have them, with what they must give."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from ranks import launch, run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.launch.cluster_environment import free_port

PROGRAMS = Path(__file__).parent / "other_programs"
SUM = """
import os, sys
import torch
import hvdtrain.torch as hvd

hvd.init()
total = float(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum))
print(f"{total} on {os.environ.get('GROUP_RANK', 'none')} of {hvd.size()}\\n", end="", flush=True)
if sys.argv[1:] == ["fail"] and hvd.rank() == 1:
    raise ValueError("told to")
hvd.barrier()
"""
# As cells of a notebook.
CELLS = """
def train(rate):
    import hvdtrain.torch as hvd
    hvd.init()
    return hvd.rank(), rate * hvd.size()

import hvdtrain
print(hvdtrain.run(train, args=(0.5,), np=2))
"""


def test_a_coordinator_a_worker_a_parameter_server_and_an_evaluator(tmp_path: Path) -> None:
    """Three steps towards 3, each of half the way; the evaluator reads the last checkpoint."""
    words = ["--roles", "chief:1,worker:1,ps:1,evaluator:1", str(PROGRAMS / "parameter_server.py")]
    done = run_ranks(
        ["-m", "hvdtrain", "exec", *words, str(tmp_path)],
        4,
        python=tensorflow_python(),
        env=keras_variables(),
    )
    lines = {line for line in done.stdout.splitlines() if line.startswith(("chief", "evaluator"))}
    assert lines == {"chief: weight 2.625 on the server", "evaluator: loss 0.140625"}


def test_efficientnet_on_ranks_and_on_mirrored_devices(tmp_path: Path) -> None:
    """On two devices of one process, MirroredStrategy, and on two ranks: the same training."""
    generator = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "images" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 128, (40, 36, 3)) + 60 * (number % 3)
        Image.fromarray(pixels.astype("uint8")).save(folder / f"{number}.png")
    for out, ranks, words in (("ranks", 2, []), ("mirrored", 1, ["mirrored"])):
        run_ranks(
            [str(PROGRAMS / "image_folder.py"), str(tmp_path / "images"), str(tmp_path / out)],
            ranks,
            args=words,
            python=tensorflow_python(),
            env=keras_variables(),
            timeout_seconds=900,
        )
    first, second, mirrored = (
        _saved(tmp_path / f"{name}.npz") for name in ("ranks-0", "ranks-1", "mirrored-0")
    )
    assert all((first[name] == second[name]).all() for name in first)
    start, end = first["arr_0"], first["arr_1"]
    assert np.abs(end - start).max() > 1e-3
    np.testing.assert_array_equal(mirrored["arr_0"], start)
    np.testing.assert_allclose(mirrored["arr_1"], end, rtol=0, atol=1e-5)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(mirrored[name], first[name], rtol=1e-5)


def _saved(path: Path) -> dict[str, Any]:
    with np.load(path) as arrays:
        return dict(arrays)


def test_models_that_a_rank_logs(tmp_path: Path) -> None:
    done = start([sys.executable, PROGRAMS / "logged_models.py", tmp_path], cwd=tmp_path).end(
        code=0
    )
    assert done.stdout.splitlines()[-2:] == ["Sequential", "RecursiveScriptModule"]


def test_a_launcher_on_each_of_two_hosts(tmp_path: Path) -> None:
    """torchrun --nnodes 2, here on one machine."""
    script, port = tmp_path / "sum.py", free_port("127.0.0.1")
    script.write_text(SUM)
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    words += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    with start([*words, "--node-rank=1", script]) as second:
        first = start([*words, "--node-rank=0", script]).end(code=0)
        assert second.ended(code=0).stdout == "10.0 on 1 of 4\n" * 2
    assert first.stdout == "10.0 on 0 of 4\n" * 2


def test_ranks_from_ipython(tmp_path: Path) -> None:
    """Called in a session, and as CNTK's tutorial starts them: mpiexec ipython SCRIPT."""
    ipython, env = ["-m", "IPython", "--no-banner"], {"IPYTHONDIR": tmp_path}
    cells, script = tmp_path / "cells.ipy", tmp_path / "sum.py"
    cells.write_text(CELLS)
    script.write_text(SUM)
    done = start([sys.executable, *ipython, cells], env=env).end(code=0)
    assert done.stdout == "[(0, 1.0), (1, 1.0)]\n"
    done = run_ranks([*ipython, str(script)], 2, env=env)
    assert done.stdout == "3.0 on none of 2\n" * 2
    failed = launch([*ipython, str(script), "--", "fail"], 2, env=env).end(code=1)
    assert "ValueError" in failed.stdout + failed.stderr
