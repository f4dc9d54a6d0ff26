"""The formats in which hosts are written: lists of launchers, and those that jobs get."""

from __future__ import annotations

import codecs
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from pathlib import Path

from hvdtrain.launch.hosts.host import (
    Host,
    HostfileError,
    HostText,
    add_up,
    check_name,
    check_slots,
    mixed_names,
)

_SLOTS = {"slots", "cpu", "count"}
_MOST = {f"{a}{dash}{b}" for dash in "_-" for a, b in (("max", "slots"), ("slots", "max"))}
_MOST |= {
    f"{a}{dash}{b}"
    for dash in "_-"
    for word in ("cpu", "count")
    for a, b in (("max", word), (word, "max"))
}
_OTHERS = {"port", "username"}
_COMMENT = re.compile(r"/\*.*?\*/|(#|//).*")
_HOST_AND_COUNT = re.compile(r"([^:]+):(\d+)")


def read_open_mpi(source: HostText) -> list[Host]:
    """Return the hosts of a hostfile, each once."""
    last = source.text.rpartition("\n")[2]
    if any(comment[1] for comment in _COMMENT.finditer(last)):
        where = f"{source.name}:{len(source.text.splitlines())}"
        mend = "Open MPI needs a newline after a comment: end this line with one"
        raise HostfileError(where, "", mend)
    listed: list[tuple[str, Host]] = []
    for where, line in source.lines():
        text = _COMMENT.sub(" ", line)
        if "/*" in text:
            raise HostfileError(where, "/*", "this comment does not end: write */ in the same line")
        tokens = re.sub(r"\s*=\s*", "=", text).split()
        if tokens:
            listed.append((where, _host(tokens, where)))
    return _once(listed)


def _host(tokens: Sequence[str], where: str) -> Host:
    first, *rest = tokens
    _refuse_foreign(first, where)
    user, _, name = first.rpartition("@")
    numbers: dict[str, int] = {}
    others = []
    for token in rest:
        key, sign, value = token.partition("=")
        if not sign:
            mend = f"is unexpected: write '{name} slots=N', one host per line"
            if token.isascii() and token.isdecimal():
                mend = f"Open MPI ignores it: write '{name} slots={token}'"
            raise HostfileError(where, token, mend)
        if key in _OTHERS:
            user = value if key == "username" else user
        elif key in _SLOTS | _MOST:
            kind = "most" if key in _MOST else "slots"
            if kind in numbers:
                raise HostfileError(where, token, "is a second number: Open MPI takes one")
            numbers[kind] = check_slots(value, where, token)
        else:
            mend = "Open MPI knows slots=, max_slots=, port= and username="
            if key.lower() in _SLOTS | _MOST | _OTHERS:
                mend = f"Open MPI needs it in lower case: {key.lower()}="
            raise HostfileError(where, token, mend)
        if key == "port" or key in _MOST:
            others.append(token)
    slots, most = numbers.get("slots"), numbers.get("most")
    if slots is not None and most is not None and most < slots:
        raise HostfileError(where, f"max_slots={most}", f"is less than slots={slots}: raise it")
    return Host(check_name(name, where, ipv6=True), slots, user, tuple(others))


def _refuse_foreign(first: str, where: str) -> None:
    if match := _HOST_AND_COUNT.fullmatch(first):
        mend = (
            "is MPICH's form, which Open MPI takes for a host's name: "
            f"write '{match[1]} slots={match[2]}'"
        )
        raise HostfileError(where, first, mend)
    if "," in first:
        raise HostfileError(
            where, first, "Open MPI takes it for one host's name: one host per line"
        )
    if first.startswith(("^", "+", "rank=")) or first == "rank":
        mend = (
            "excluded and relative hosts and rankfiles are not read here: name the hosts themselves"
        )
        raise HostfileError(where, first, mend)


def _once(listed: Sequence[tuple[str, Host]]) -> list[Host]:
    """Merge hosts that are listed again, with one slot for each listing, as Open MPI does."""
    lines: dict[str, list[str]] = {}
    for where, host in listed:
        lines.setdefault(host.name, []).append(where)
    hosts = []
    for _, host in listed:
        first, *again = lines[host.name]
        if again and host.slots is not None:
            mend = f"is also in {first}, which goes only without slots=: list it once"
            raise HostfileError(again[0], host.name, mend)
        hosts.append(replace(host, slots=1) if again else host)
    return add_up(hosts)


def read_hydra(source: HostText) -> list[Host]:
    """Return the hosts of a hostfile, each once; a host without a number has one slot."""
    return add_up([_hydra_host(line, where) for where, line in source.lines() if line[0] != "#"])


def _hydra_host(line: str, where: str) -> Host:
    first, *rest = line.split()
    name, colon, count = first.partition(":")
    user, others = "", []
    for token in rest:
        key, _, value = token.partition("=")
        if key == "user" and value:
            user = value
        elif key == "binding" and value:
            others.append(token)
        else:
            raise HostfileError(where, token, _mend(token, name))
    if first.count(":") > 1:
        raise HostfileError(where, first, "an IPv6 address cannot stand here: use a host's name")
    slots = check_slots(count, where, first) if colon else 1
    return Host(check_name(name, where), slots, user, tuple(others))


def _mend(token: str, name: str) -> str:
    if token.startswith("slots"):
        return f"is Open MPI's form: write '{name}:{token.partition('=')[2] or 'N'}'"
    if token.startswith("#"):
        return "MPICH takes a comment only in a line of its own"
    if token.isascii() and token.isdecimal():
        return f"is unexpected: write '{name}:{token}'"
    return f"is unexpected: write '{name}:N', one host per line; MPICH knows binding= and user="


_MOST_OF_A_RANGE = 65_536
# Of a list, between commas that are in no brackets.
_PART = re.compile(r"(?:^|,)((?:\[[^][]*\]|[^,])*)")
_BRACKET = re.compile(r"\[([^][]*)\]")
_COUNT = re.compile(r"(\d{1,8})(?:\(x(\d{1,8})\))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")


def expand(text: str, where: str) -> list[str]:
    """Return the names of a list: n[1-2]a[0,3] is n1a0, n1a3, n2a0, n2a3."""
    names: list[str] = []
    for part in _PART.findall(text.strip()):
        if not part:
            raise HostfileError(where, text[:80], "has nothing between two commas")
        pieces = _BRACKET.split(part)
        if any("]" in piece for piece in pieces[::2]):
            raise HostfileError(where, text[:80], "has unbalanced brackets")
        if any("[" in piece for piece in pieces[::2]):
            raise HostfileError(where, part[:80], "has a bracket that is not closed: write ]")
        choices = [
            _range(piece, part, where) if number % 2 else [piece]
            for number, piece in enumerate(pieces)
        ]
        if prod(map(len, choices)) > _MOST_OF_A_RANGE:
            raise HostfileError(where, part, f"is more than {_MOST_OF_A_RANGE} hosts")
        names += [check_name("".join(words), where) for words in product(*choices)]
    return names


def compress(names: Sequence[str]) -> str:
    """Return a host list that expand() reads back, with ranges for consecutive names."""
    words = []
    for (stem, *_), run in groupby(enumerate(names), _range_of):
        numbers = [name.removeprefix(stem) for _, name in run]
        several = f"[{numbers[0]}-{numbers[-1]}]"
        words.append(stem + (several if len(numbers) > 1 else numbers[0]))
    return ",".join(words)


def _range_of(numbered: tuple[int, str]) -> tuple[str, int, int]:
    """Return what is equal for consecutive names of one range."""
    index, name = numbered
    match = _NUMBERED.fullmatch(name)
    return (match[1], len(match[2]), int(match[2]) - index) if match else (name, 0, index)


def expand_counts(text: str, where: str) -> list[int]:
    """Return the numbers of a Slurm count list: 2(x3),1 is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise HostfileError(where, part, "is not a number of tasks: write it as in 2(x3),1")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MOST_OF_A_RANGE:
            raise HostfileError(where, part, f"is more than {_MOST_OF_A_RANGE} hosts")
        counts += [check_slots(match[1], where, part)] * repeats
    return counts


def compress_counts(counts: Sequence[int]) -> str:
    """Return numbers as a Slurm count list."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def _range(text: str, part: str, where: str) -> list[str]:
    names: list[str] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        high = high if dash else low
        if not (low.isascii() and low.isdecimal() and high.isascii() and high.isdecimal()):
            raise HostfileError(
                where, part[:80], f"{piece!r} is not a range: write it as in [01-04,07]"
            )
        if max(len(low), len(high)) > 9:
            raise HostfileError(where, part[:80], f"{piece!r} has too many digits")
        first, last = int(low), int(high)
        if last < first:
            raise HostfileError(where, part[:80], f"{piece!r} runs backwards: write [{high}-{low}]")
        if last - first + len(names) >= _MOST_OF_A_RANGE:
            raise HostfileError(where, part[:80], f"is more than {_MOST_OF_A_RANGE} hosts")
        names += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return names


_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")
_SETTING = re.compile(r"(?:export\s+)?(\w+)=(['\"]?)(.*)\2")
# Nodes that run the script of an LSF job, on machines that have such nodes.
_LAUNCH_NODE = re.compile(r"(batch|login)\d*(\..*)?")


def read_slurm(source: HostText) -> list[Host]:
    """Return the hosts in Slurm's two variables, as `env` prints them."""
    found = {
        match[1]: match[3] for _, line in source.lines() if (match := _SETTING.fullmatch(line))
    }
    nodes = next((found[name] for name in _NODES if found.get(name)), "")
    tasks = next((found[name] for name in _TASKS if found.get(name)), "")
    if not nodes:
        raise HostfileError(source.name, "", f"no {_NODES[0]}: call it within a job of Slurm")
    names = expand(nodes, _NODES[0])
    if not tasks:
        return [Host(name) for name in dict.fromkeys(names)]
    counts = expand_counts(tasks, _TASKS[0])
    if len(counts) != len(names):
        mend = f"tells of {len(counts)} hosts, but {_NODES[0]} of {len(names)}"
        raise HostfileError(_TASKS[0], tasks[:80], mend)
    return add_up([Host(*pair) for pair in zip(names, counts, strict=True)])


def read_lines(source: HostText) -> list[Host]:
    """Return the hosts of a file with one line per slot, as PBS, OAR and LSF write it."""
    return add_up([Host(check_name(line, where), 1) for where, line in source.lines()])


def read_sge(source: HostText) -> list[Host]:
    """Return the hosts of $PE_HOSTFILE: `host slots queue processors`."""
    hosts = []
    for where, line in source.lines():
        name, *rest = line.split()
        if not rest:
            raise HostfileError(where, line, "lacks the number of slots: host slots queue")
        if len(rest) > 2 and rest[2].isdecimal():
            raise HostfileError(where, rest[2], "is another host's number, as in LSF's form")
        hosts.append(Host(check_name(name, where), check_slots(rest[0], where, rest[0])))
    return add_up(hosts)


def read_lsf(source: HostText) -> list[Host]:
    """Return the hosts of $LSB_MCPU_HOSTS, `host1 4 host2 4`, without the job script's node."""
    words = source.text.split()
    if len(words) % 2:
        raise HostfileError(source.name, words[-1], "has no number after it: write host slots")
    pairs = list(zip(words[::2], words[1::2], strict=True))
    hosts = [
        Host(check_name(name, source.name), check_slots(count, source.name, f"{name} {count}"))
        for name, count in pairs
    ]
    if len(hosts) > 1 and _LAUNCH_NODE.fullmatch(hosts[0].name):
        hosts = hosts[1:]
    return add_up(hosts)


def read_flux(source: HostText) -> list[Host]:
    """Return the hosts of `flux hostlist`, which has no slots."""
    text = source.text.strip()
    names = expand(text, source.name) if text else []
    return [Host(name) for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Format:
    """A format for a list of hosts."""

    read: Callable[[HostText], list[Host]]
    write: Callable[[Sequence[Host]], str]
    slots: bool = True
    users: bool = False
    ipv6: bool = False


def _each(line: Callable[[Host], str]) -> Callable[[Sequence[Host]], str]:
    return lambda hosts: "".join(map(line, hosts))


def _write_hydra(host: Host) -> str:
    return f"{host.name}:{host.slots}" + (f" user={host.user}" if host.user else "") + "\n"


def _write_slurm(hosts: Sequence[Host]) -> str:
    counts = compress_counts([host.slots or 1 for host in hosts])
    return f"{_NODES[0]}={compress([host.name for host in hosts])}\n{_TASKS[0]}={counts}\n"


_OPEN_MPI = Format(
    read_open_mpi, _each(lambda host: f"{host.login} slots={host.slots}\n"), users=True, ipv6=True
)
_HYDRA = Format(read_hydra, _each(_write_hydra), users=True)
_LINES = Format(read_lines, _each(lambda host: f"{host.name}\n" * (host.slots or 1)))
FORMATS: Mapping[str, Format] = {
    "openmpi": _OPEN_MPI,
    "mpich": _HYDRA,
    "intelmpi": _HYDRA,
    "slurm": Format(read_slurm, _write_slurm),
    "pbs": _LINES,
    "oar": _LINES,
    "sge": Format(read_sge, _each(lambda h: f"{h.name} {h.slots} all.q@{h.name} <NULL>\n")),
    "lsf": Format(
        read_lsf, lambda hosts: " ".join(f"{host.name} {host.slots}" for host in hosts) + "\n"
    ),
    "pjm": Format(read_open_mpi, _each(lambda host: f"{host.name}\n"), slots=False),
    "flux": Format(
        read_flux, lambda hosts: compress([host.name for host in hosts]) + "\n", slots=False
    ),
    "k8s": _OPEN_MPI,
}

# Variables with the path of a job's hostfile.
_FILES = {
    "pbs": "PBS_NODEFILE",
    "oar": "OAR_NODEFILE",
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
    commands = ["flux getattr hostlist"]
    if "FLUX_JOB_ID" in environ:
        # In a task, the attribute may be of the instance that has the whole cluster. Flux of
        # before 2024 has nothing else.
        commands.insert(0, "flux hostlist local")
    for command in commands:
        try:
            done = subprocess.run(
                command.split(), capture_output=True, text=True, timeout=20, check=True
            )
            return HostText(command, done.stdout)
        except (OSError, subprocess.SubprocessError) as error:
            failed = error
    raise HostfileError(command, "", f"failed ({failed}): this is not a job of flux")


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
            words.append(host.login)
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
