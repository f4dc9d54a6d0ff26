"""Hosts are read, written, converted and refused, in the form of each launcher and scheduler."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusing import refused

from hvdtrain.launch.hosts import formats
from hvdtrain.launch.hosts.host import Host, HostfileError, HostText

names = st.from_regex(r"[a-z][a-z0-9]{0,4}(-?[0-9]{1,3})?(\.[a-z]{1,4})?", fullmatch=True)
lists = st.lists(
    st.builds(Host, names, st.integers(1, 300)), min_size=1, max_size=30, unique_by=lambda h: h.name
)


@given(st.sampled_from(sorted(formats.FORMATS)), lists)
def test_what_was_written_is_read_back(form: str, hosts: list[Host]) -> None:
    it = formats.FORMATS[form]
    found = it.read(HostText("hosts", it.write(hosts)))
    expected = hosts if it.slots else [Host(host.name) for host in hosts]
    if form == "lsf" and len(hosts) > 1 and hosts[0].name.startswith(("batch", "login")):
        expected = hosts[1:]
    assert found == expected


# Near to what is right, where a mistake is likelier to be taken.
PARTS = [
    *("node1", "slots", "=", "4", "-1", ":", ",", "[", "]", "-", "01", "#", "/*", "max_slots"),
    *("SLURM_JOB_NODELIST=", "SLURM_TASKS_PER_NODE=", "(x3)", "rank", "@", "^", " ", "\n"),
]
almost = st.lists(st.sampled_from(PARTS)).map("".join)


@given(st.sampled_from(sorted(formats.FORMATS)), almost)
def test_near_misses_are_hostfile_errors(form: str, text: str) -> None:
    source = HostText("hosts", text)
    formats.guess_format(source)
    try:
        hosts = formats.FORMATS[form].read(source)
    except HostfileError:
        return
    assert all(host.slots is None or host.slots > 0 for host in hosts)
    assert len({host.name for host in hosts}) == len(hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (
            "node1\nnode2 slots = 2 max-slots=3",
            [Host("node1"), Host("node2", 2, "", ("max-slots=3",))],
        ),
        ("node1\n\n  me@node1 // again\nnode1", [Host("node1", 3, "me")]),
        ("me@node1 slots=1 /* mine */ port=22", [Host("node1", 1, "me", ("port=22",))]),
        ("fe80::1 slots=2\n10.0.0.1 cpu=3", [Host("fe80::1", 2), Host("10.0.0.1", 3)]),
        ("node1 count=2 username=her\r\n", [Host("node1", 2, "her")]),
    ],
)
def test_open_mpi(text: str, hosts: list[Host]) -> None:
    assert formats.FORMATS["openmpi"].read(HostText("hosts", text)) == hosts


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("openmpi", "a\nnode1 4", "hosts:2: '4': Open MPI ignores it: write 'node1 slots=4'"),
        ("openmpi", "node1:4", "hosts:1: 'node1:4': is MPICH's form, .* write 'node1 slots=4'"),
        ("openmpi", "a,b", "'a,b': Open MPI takes it for one host's name: one host per line"),
        ("openmpi", "a slots=0", "'slots=0': needs an integer of at least 1"),
        ("openmpi", "a slots=four", "'slots=four': needs an integer"),
        ("openmpi", "a slots=9999999", "is more than any host has"),
        ("openmpi", "a gpus=4", "'gpus=4': Open MPI knows slots=, max_slots="),
        ("openmpi", "a SLOTS=4", "'SLOTS=4': Open MPI needs it in lower case: slots="),
        ("openmpi", "a slots=4 max_slots=2", "'max_slots=2': is less than slots=4"),
        ("openmpi", "a slots=4 b", "'b': is unexpected: write 'a slots=N', one host per line"),
        ("openmpi", "a slots=2 slots=3", "hosts:1: 'slots=3': is a second number"),
        ("openmpi", "a slots=1\nb\n\na slots=2", "hosts:4: 'a': is also in hosts:1, which goes"),
        ("openmpi", "a slots=1\nb slots=1 # two", "hosts:2: Open MPI needs a newline after a"),
        ("openmpi", "name_of_node1 slots=4", "'name_of_node1': is a placeholder"),
        ("openmpi", "a /* slots=4", "'/\\*': this comment does not end"),
        ("openmpi", "^a", "'\\^a': excluded and relative hosts"),
        ("openmpi", "rank 0=a slot=1", "rankfiles"),
        ("openmpi", "a! slots=1", "'a!': is not a host name"),
        ("mpich", "a slots=4", "hosts:1: 'slots=4': is Open MPI's form: write 'a:4'"),
        ("mpich", "a:2 # two", "'#': MPICH takes a comment only in a line of its own"),
        ("mpich", "a 4", "'4': is unexpected: write 'a:4'"),
        ("mpich", "fe80::1:4", "an IPv6 address cannot stand here"),
        ("slurm", "SLURM_JOB_NODELIST=a[1-2", "SLURM_JOB_NODELIST: .*bracket that is not closed"),
        ("slurm", "SLURM_JOB_NODELIST=a[2-1]", "'2-1' runs backwards: write \\[1-2\\]"),
        ("slurm", "SLURM_JOB_NODELIST=a[1--2]", "is not a range"),
        ("slurm", "SLURM_JOB_NODELIST=a[0-99999]", "more than 65536 hosts"),
        (
            "slurm",
            "SLURM_JOB_NODELIST=a[1-3]\nSLURM_TASKS_PER_NODE=2(x2)",
            "SLURM_TASKS_PER_NODE: '2\\(x2\\)': tells of 2 hosts, but SLURM_JOB_NODELIST of 3",
        ),
        ("slurm", "SLURM_JOB_NODELIST=a\nSLURM_TASKS_PER_NODE=two", "is not a number of tasks"),
        ("slurm", "", "no SLURM_JOB_NODELIST: call it within a job of Slurm"),
        ("sge", "a", "lacks the number of slots"),
        ("sge", "a 4 b 4", "hosts:1: '4': is another host's number, as in LSF's form"),
        ("lsf", "a 2 b", "'b': has no number after it"),
        ("pbs", "a b", "'a b': is not a host name"),
    ],
)
def test_refused(form: str, text: str, message: str) -> None:
    with refused(kind=HostfileError, match=message):
        formats.FORMATS[form].read(HostText("hosts", text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("r[0-1]n[00-02]", "r0n00 r0n01 r0n02 r1n00 r1n01 r1n02"),
        ("a[9-11],b", "a9 a10 a11 b"),
        ("n[01-02,07].x", "n01.x n02.x n07.x"),
    ],
)
def test_ranges(text: str, found: str) -> None:
    assert formats.expand(text, "x") == found.split()


def test_ranges_are_written_short() -> None:
    assert formats.compress(["n08", "n09", "n10", "n12", "n99", "m"]) == "n[08-10],n12,n99,m"
    assert formats.compress(["n9", "n10"]) == "n9,n10"
    assert formats.compress_counts([2, 2, 2, 1]) == "2(x3),1"


# As jobs have recorded them, with other names of the same form.
TOLD = json.loads(Path(__file__).with_name("scheduler_hosts.json").read_text())


@pytest.mark.parametrize("row", TOLD, ids=lambda row: row["source"])
def test_what_schedulers_tell(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, told = row["form"], row["told"]
    path, flux = tmp_path / "told", tmp_path / "flux"
    path.write_text(told)
    # In a task, the instance may have the whole cluster.
    flux.write_text(f'#!/bin/sh\ntest "$*" = "hostlist local" && cat {path}\n')
    flux.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    files = ("PBS_NODEFILE", "OAR_NODEFILE", "PE_HOSTFILE", "PJM_O_NODEINF")
    environ = dict.fromkeys(files, str(path)) | {"LSB_MCPU_HOSTS": told, "FLUX_JOB_ID": "f2rB"}
    environ |= {"SLURM_JOB_NODELIST": told, "SLURM_TASKS_PER_NODE": "4(x2)"}
    hosts = formats.FORMATS[form].read(formats.source_of_job(form, environ))
    assert hosts == [Host(*pair) for pair in row["hosts"]]


@pytest.mark.parametrize("environ", [{}, {"FLUX_JOB_ID": "f2rB"}])
def test_flux_without_a_hostlist_command(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flux = tmp_path / "flux"
    flux.write_text('#!/bin/sh\ntest "$*" = "getattr hostlist" && echo "node[1-2]"\n')
    flux.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert formats.source_of_job("flux", environ).text.strip() == "node[1-2]"


def test_without_a_job() -> None:
    for name in ("pbs", "oar", "sge", "lsf", "pjm", "flux", "k8s"):
        with pytest.raises(HostfileError, match=r"not a job of|does not exist"):
            formats.source_of_job(name, {})


def test_files_of_windows_and_others(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\nnode2 slots=2")
    source = formats.read_file(str(path))
    assert source.foreign
    assert formats.FORMATS["openmpi"].read(source) == [Host("node1", 2), Host("node2", 2)]
    for raw in (b"\xef\xbb\xbfnode1 slots=2\n", b"node1 slots=2\r\n"):
        path.write_bytes(raw)
        with pytest.raises(HostfileError, match=r"hvdtrain hosts --from .* --to openmpi writes"):
            formats.read_hostfile(str(path), "openmpi")
    for content, message in (
        (b"a\nb\0", "hosts:2: contains a zero byte"),
        ("a\nnöde".encode(), "hosts:2: contains a character that is not ASCII"),
    ):
        path.write_bytes(content)
        with pytest.raises(HostfileError, match=message):
            formats.read_file(str(path))
    with pytest.raises(HostfileError, match="is not a file"):
        formats.read_file(str(tmp_path))
    with pytest.raises(HostfileError, match="does not exist"):
        formats.read_file(str(tmp_path / "none"))


@pytest.mark.parametrize("form", ["openmpi", "mpich", "slurm", "sge", "lsf", "flux"])
def test_the_form_is_guessed(form: str) -> None:
    text = formats.FORMATS[form].write([Host("node1", 2), Host("node2", 2)])
    assert formats.guess_format(HostText("hosts", text)) == form
    assert formats.guess_format(HostText("hosts", f"# SLURM_X=1\n{text}#b 1 c 1\n#d:4\n")) == form


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=4 // rack [3], node[1-2]\n",
        "# written from SLURM_JOB_NODELIST\nnode1 slots=4\n",
        "SLURM_node slots=4 # a:4\n",
        "node1 4\n",
    ],
)
def test_no_other_form_is_guessed_from_a_comment(text: str) -> None:
    assert formats.guess_format(HostText("hosts", text)) == "openmpi"


@pytest.mark.parametrize("form", formats.FORMATS)
def test_an_address_is_written_where_it_can_be_read_back(form: str) -> None:
    hosts = [Host("node1", 2), Host("fe80::1", 2)]
    if form in ("openmpi", "k8s"):
        written = HostText("hosts", formats.write_hosts(hosts, form))
        assert formats.FORMATS[form].read(written) == hosts
    else:
        with pytest.raises(HostfileError, match=f"form {form}: 'fe80::1': an IPv6 address cannot"):
            formats.write_hosts(hosts, form)


def test_one_host_under_two_names_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2\nnode1.ex.com slots=2\n")
    with pytest.raises(HostfileError, match=r"hosts: node1 and node1.ex.com: one host under two"):
        formats.read_hostfile(str(path), "openmpi")
    for name in ("127.0.0.1", socket.gethostname()):
        path.write_text(f"localhost slots=1\n{name} slots=1\n")
        with pytest.raises(HostfileError, match=f"{re.escape(name)}.*: one host under two names"):
            formats.read_hostfile(str(path), "openmpi")
    path.write_text("node1\nnode2.ex.com slots=2\n")
    assert len(formats.read_hostfile(str(path), "openmpi")) == 2
