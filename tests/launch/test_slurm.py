"""The scripts for Slurm, submitted to it: two nodes on this machine, a rank on each."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemons import job_script
from ranks import mpi_python, torch_beside
from run_files import both_splits, epochs_of, require_each_sample_once, summary_of
from slurm import Slurm, require_slurm

from hvdtrain.cli.job import command
from hvdtrain.launch.sites import sites

WORKER = Path(__file__).with_name("job_worker.py")
RECIPE = Path(__file__).with_name("held_recipe.py")
# How mpirun and srun are each asked for, and whose MPI the ranks have.
HOW = {
    "mpirun": ("openmpi", ["--launcher", "mpirun"]),
    "pmi2": ("mpich", ["--launcher", "srun", "--mpi", "pmi2"]),
    "pmix": ("openmpi", ["--launcher", "srun", "--mpi", "pmix"]),
}
# Slurm looks every 30 seconds, and gives notice up to 30 too early: with 20 seconds behind it, a
# job has begun to train.
SOON = ["--time", "2m", "--notice", "70s"]
NEVER = ["--time", "1h"]
# Where a rank does not find its world: in the shell of a job, and where srun speaks no MPI.
TRAPS = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=traps.out
init='from hvdtrain.core import context as c; c.init(); print("ranks:", c.current().topology.size)'
for launcher in "" "srun --mpi=none" "srun --mpi=pmi2"; do
  echo "## $launcher"
  $launcher {python} -c "$init"
done
echo "## end"
"""

CHECK = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=check.out
OMP_NUM_THREADS=64 {python} -m hvdtrain check --job --timeout 300
echo "## $?"
"""


class Site:
    def __init__(self, slurm: Slurm, directory: Path) -> None:
        self.slurm, self.directory = slurm, directory

    def submit(self, name: str, how: str, *words: object, limit: Sequence[str] = NEVER) -> str:
        options = ["--nodes", 2, "--ranks-per-node", 1, "--cpus-per-rank", 1, *limit]
        mpi, launcher = HOW[how]
        more = ["--python", str(mpi_python(mpi)), *launcher]
        script = job_script(self.directory, name, "slurm", *options, *more, *words)
        return self.slurm.submit(script, torch_beside("mpich"))

    def output(self, name: str, job: str) -> Path:
        return self.directory / f"{name}-{job}.out"


@pytest.mark.slurm
def test_generated_scripts(tmp_path: Path) -> None:
    require_slurm()
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm") as slurm:
        site = Site(slurm, tmp_path)
        limited = site.submit("limited", "mpirun", "--", WORKER, "slow", limit=SOON)
        traps = tmp_path / "traps.sh"
        traps.write_text(TRAPS.format(python=mpi_python("mpich")))
        slurm.submit(traps, torch_beside("mpich"))
        fences = site.submit("fences", "pmix", "--", WORKER, "fences")
        jobs_that_are_told_to_stop(site)
        slurm.wait_for_state(fences, ["COMPLETED", "FAILED"])
        assert site.output("fences", fences).read_text().count("early: 0\n") == 2
        ranks_that_die(site)
        ranks_without_their_world(site)
        slurm.wait_for_state(limited, ["COMPLETED", "FAILED"])
        a_job_that_met_its_time_limit(site, limited)


@pytest.mark.slurm
def test_scripts_of_sites(tmp_path: Path) -> None:
    """Slurm and srun take their options, where nodes claim the cores and GPUs of each site."""
    require_slurm()
    (tmp_path / "slurm").mkdir()
    with Slurm(tmp_path / "slurm", cpus=288, gpus=8) as slurm:
        jobs = {}
        for name, site in sites().items():
            if site.scheduler == "slurm":
                words = ["--site", name, "--nodes", "2", "--time", "10m", "--account", "lab"]
                done = CliRunner().invoke(command, [*words, "--name", name, "--python", "echo"])
                (tmp_path / f"{name}.sh").write_text(done.stdout)
                jobs[name] = slurm.submit(tmp_path / f"{name}.sh", {"SBATCH_PARTITION": "debug"})
        for name, job in jobs.items():
            slurm.wait_for_state(job, ["COMPLETED", "FAILED"])
            output = (tmp_path / f"{name}-{job}.out").read_text()
            assert slurm.about(job)["JobState"] == "COMPLETED", output
            ranks = 2 * sites()[name].options["gpus_per_node"]
            assert output.count("-m hvdtrain train digits") == ranks, output


@pytest.mark.slurm
def test_check_of_a_job(tmp_path: Path) -> None:
    """One rank on each node of the allocation, which knows how many ranks a node is to have."""
    require_slurm()
    (tmp_path / "slurm").mkdir()
    script, output = tmp_path / "check.sh", tmp_path / "check.out"
    script.write_text(CHECK.format(python=mpi_python("openmpi")))
    with Slurm(tmp_path / "slurm") as slurm:
        slurm.submit(script, {})
        slurm.wait_for_text(output, "## ")
    text = output.read_text()
    assert "  nodes       n[1-2]; 2 of 2 ranks have started\n" in text
    assert "OMP_NUM_THREADS=64 on 2 ranks, but " in text
    assert text.endswith("all is well\n## 0\n")


def jobs_that_are_told_to_stop(site: Site) -> None:
    """Arrays of one, with srun: they save, are started again, and end."""
    options = ["train", RECIPE, "--epochs", 8]
    told = {
        how: site.submit(how, how, "--array", "3-3", "--", *options) for how in ("pmi2", "pmix")
    }
    for how, array in told.items():
        job, output = f"{array}_3", site.output(how, f"{array}-3")
        site.slurm.wait_for_text(output, "epoch 2/8")
        site.slurm.ask("scancel", "--batch", "--signal=USR1", job)
        site.slurm.wait_for_text(output, "was asked to stop")
    for how, array in told.items():
        job, results = f"{array}_3", site.directory / "runs" / f"{how}-3"
        site.slurm.wait_for_text(site.output(how, f"{array}-3"), "test accuracy")
        site.slurm.wait_for_state(job, ["COMPLETED"])
        assert site.slurm.about(job)["Restarts"] == "1"
        assert summary_of(results)["samples"] == 8 * 1437
        assert summary_of(results)["world_size"] == 2
        assert epochs_of(results) == both_splits(8)
        assert not (results / "requeue").exists()


def ranks_that_die(site: Site) -> None:
    """With each launcher: the job fails, and is not started again."""
    jobs = {how: site.submit(f"dies-{how}", how, "--", WORKER, "dies") for how in HOW}
    for how, job in jobs.items():
        site.slurm.wait_for_state(job, ["FAILED", "COMPLETED"])
        about = site.slurm.about(job)
        assert (about["JobState"], about["Restarts"]) == ("FAILED", "0")
        assert "places n1 n2" in site.output(f"dies-{how}", job).read_text()


def ranks_without_their_world(site: Site) -> None:
    """One alone in the shell of a job is told so; ranks that do not find each other, refused."""
    output = site.directory / "traps.out"
    site.slurm.wait_for_text(output, "## end")
    shell, without, with_pmi, _ = output.read_text().split("##")[1:]
    assert "this job of Slurm has 2 tasks, and this is one rank alone" in shell
    assert "ranks: 1" in shell
    assert "srun promised 2 ranks" in without
    assert "srun --mpi=pmix, or pmi2 for MPICH" in without
    assert "ranks:" not in without
    assert with_pmi.count("ranks: 2") == 2


def a_job_that_met_its_time_limit(site: Site, job: str) -> None:
    """With mpirun: signalled by Slurm itself. Every sample was used once in each epoch."""
    output = site.output("limited", job).read_text()
    about = site.slurm.about(job)
    assert about["JobState"] == "COMPLETED", output
    assert int(about["Restarts"]) >= 1
    assert "was asked to stop" in output
    require_each_sample_once(site.directory)
    assert summary_of(site.directory / "runs" / "limited")["samples"] == 2 * 1437
