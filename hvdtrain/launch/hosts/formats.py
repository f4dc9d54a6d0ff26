"""The formats in which hosts are written, by name."""

from __future__ import annotations

import codecs
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.hosts import lists
from hvdtrain.launch.hosts.host import Host, HostfileError, HostText, check_name, mixed_names


@dataclass(frozen=True)
class Format:
    """A format for a list of hosts."""

    read: Callable[[HostText], list[Host]]
    write: Callable[[Sequence[Host]], str]
    slots: bool = True
    users: bool = False
    ipv6: bool = False


FORMATS: Mapping[str, Format] = {
    "openmpi": Format(lists.read_open_mpi, lists.write_open_mpi, users=True, ipv6=True),
    "mpich": Format(lists.read_hydra, lists.write_hydra, users=True),
    "intelmpi": Format(lists.read_hydra, lists.write_hydra, users=True),
    "slurm": Format(lists.read_slurm, lists.write_slurm),
    "pbs": Format(lists.read_lines, lists.write_lines),
    "sge": Format(lists.read_sge, lists.write_sge),
    "lsf": Format(lists.read_lsf, lists.write_lsf),
    "pjm": Format(lists.read_open_mpi, lists.write_names, slots=False),
    "flux": Format(lists.read_flux, lists.write_flux, slots=False),
    "k8s": Format(lists.read_open_mpi, lists.write_open_mpi, users=True, ipv6=True),
}

# Variables with the path of a job's hostfile.
_FILES = {
    "pbs": "PBS_NODEFILE",
    "sge": "PE_HOSTFILE",
    "pjm": "PJM_O_NODEINF",
}
# Written by some editors, and misread by launchers.
FOREIGN = "has a byte-order mark, or lines that end as in Windows"
_K8S_FILE = "/etc/mpi/hostfile"
_HYDRA_LINE = re.compile(r"[^\s:#]+:\d+(\s.*)?")
_SLURM_LINE = re.compile(r"(export\s+)?SLURM_\w+=.*")


def source_of_job(name: str, environ: Mapping[str, str]) -> HostText:
    """Return the scheduler's list of the hosts of this job."""
    if name in _FILES:
        path = environ.get(_FILES[name])
        if not path:
            raise HostfileError(f"${_FILES[name]}", "", f"is not set: this is not a job of {name}")
        return read_file(path)
    if name == "k8s":
        return read_file(_K8S_FILE)
    if name == "slurm":
        settings = (f"{key}={value}" for key, value in environ.items() if key.startswith("SLURM_"))
        return HostText("the environment", "\n".join(settings))
    if name == "lsf":
        if not environ.get("LSB_MCPU_HOSTS"):
            raise HostfileError("$LSB_MCPU_HOSTS", "", "is not set: this is not a job of lsf")
        return HostText("$LSB_MCPU_HOSTS", environ["LSB_MCPU_HOSTS"])
    return HostText("flux getattr hostlist", _ask_flux())


def _ask_flux() -> str:
    command = ["flux", "getattr", "hostlist"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise HostfileError(
            " ".join(command), "", f"failed ({error}): this is not a job of flux"
        ) from None
    return done.stdout


def read_file(path: str) -> HostText:
    """Return the text of a hostfile."""
    file = Path(path)
    where = f"hostfile {path}"
    if not os.path.exists(path):
        raise HostfileError(where, "", "does not exist: see hostfiles/ for templates")
    if not os.path.isfile(path):
        raise HostfileError(where, "", "is not a file: name a text file, one host per line")
    try:
        raw = file.read_bytes()
        mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
        text = raw.removeprefix(mark).decode("ascii")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise HostfileError(
            f"{path}:{line}", "", "contains a character that is not ASCII"
        ) from None
    except OSError as error:
        raise HostfileError(where, "", f"cannot be read: {error.strerror}") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise HostfileError(f"{path}:{line}", "", "contains a zero byte: it is not a text file")
    return HostText(path, text, foreign=bool(mark) or "\r" in text)


def read_hostfile(path: str, form: str) -> list[Host]:
    """Return the hosts of a file that is passed to a launcher as it is, one or more."""
    source = read_file(path)
    hosts = FORMATS[form].read(source)
    if source.foreign:
        mend = f"{FOREIGN}: python -m hvdtrain hosts --from {path} --to {form} writes another"
        raise HostfileError(f"hostfile {path}", "", mend)
    if not hosts:
        raise HostfileError(f"hostfile {path}", "", "names no host: write one host per line")
    if form == "openmpi" and (mixed := mixed_names(hosts)):
        raise HostfileError(f"hostfile {path}", "", "; ".join(mixed))
    return hosts


def write_hosts(hosts: Sequence[Host], form: str) -> str:
    """Return the text that lists hosts in a format."""
    for host in hosts:
        check_name(host.name, f"form {form}", ipv6=FORMATS[form].ipv6)
    return FORMATS[form].write(hosts)


def left_out(hosts: Sequence[Host], form: str) -> list[str]:
    """Return the details of hosts that write_hosts() does not write in this format."""
    words = []
    for host in hosts:
        if host.user and not FORMATS[form].users:
            words.append(f"{host.user}@{host.name}")
        words += [f"{other} of {host.name}" for other in host.others]
    return words


def guess_format(source: HostText) -> str:
    """Return the name of the format that a file seems to have."""
    bare = [line.partition("#")[0].strip() for _, line in source.lines()]
    lines = [line for line in bare if line]
    if any(_HYDRA_LINE.fullmatch(line) for line in lines):
        return "mpich"
    if any(_SLURM_LINE.fullmatch(line) for line in lines):
        return "slurm"
    if any("[" in line.split()[0] for line in lines):
        return "flux"
    if lines and all(_is_lsf(line.split()) for line in lines):
        return "lsf"
    if lines and all(len(line.split()) in (3, 4) and line.split()[1].isdecimal() for line in lines):
        return "sge"
    return "openmpi"


def _is_lsf(words: Sequence[str]) -> bool:
    """Return whether host names and numbers alternate, for two hosts or more."""
    return len(words) >= 4 and len(words) % 2 == 0 and all(word.isdecimal() for word in words[1::2])
