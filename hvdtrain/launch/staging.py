"""The environment of Python carried to the nodes: packed once, unpacked and started on each."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.request import LaunchRequest

_EXECUTABLE = f"python{sys.version_info.major}.{sys.version_info.minor}"
# What a rank runs: with nothing of the archive's file system but the archive. Whoever uses the
# copy holds a shared lock on its file, which ends with the process, also by SIGKILL: who gets the
# exclusive one may remove all. That is a process beside each rank that waits for it, `run`, which
# ends it where a job fails, or, if a scheduler has killed all, the next job that brings another. A
# file that was removed while a process waited for its lock is no longer the one of that name.
_PREPARE = r"""
folder=${TMPDIR:-/tmp}/hvdtrain-copies-$(id -u)
mkdir -m 700 "$folder" 2> /dev/null
if [ -L "$folder" ] || [ ! -O "$folder" ]; then
  echo "hvdtrain: $folder is not a directory of this user's own" >&2; exit 78
fi
remove='exec 9>> "$0.lock"; flock $1 -x 9 && [ /proc/self/fd/9 -ef "$0.lock" ] &&
  rm -f "$0/ready" && rm -rf "$0" "$0.mutex" "$0.lock"'
remove_unused() {
  for lock in "$folder"/*.lock; do sh -c "$remove" "${lock%.lock}" -n 9>&-; done
}
"""
_START = rf"""{_PREPARE}
archive=$1 sent=$2; shift 2
copy=$folder/$(basename "$archive" .tar)
until exec 9>> "$copy.lock"; flock -s 9; [ /proc/self/fd/9 -ef "$copy.lock" ]; do :; done
(
  flock -x 8
  from=$archive
  if [ -n "$sent" ] && [ -O "$sent" ]; then from=$sent; trap 'rm -f "$sent"' EXIT; fi
  [ ! -e "$copy/ready" ] || exit 0
  remove_unused
  rm -rf "$copy"
  mkdir "$copy" && tar -xf "$from" -C "$copy" || exit
  if [ -d "$copy/base" ]; then
    sed -i "s|^home = .*|home = $copy/base/bin|" "$copy/env/pyvenv.cfg" || exit
  fi
  : > "$copy/ready"
) 8>> "$copy.mutex"
if [ ! -e "$copy/ready" ]; then
  echo "hvdtrain: cannot unpack $archive in $folder: name a larger directory in TMPDIR" >&2; exit 78
fi
setsid sh -c "$remove" "$copy" "" < /dev/null > /dev/null 2>&1 9>&- &
exec "$copy/env/bin/python" "$@"
"""


def remove_unused() -> None:
    """Remove the copies on this host that no process uses."""
    subprocess.run(["sh", "-c", f"{_PREPARE}remove_unused"], check=False)


def staged(request: LaunchRequest, folder: str, pack: bool) -> tuple[str, ...]:
    """Return the program of a rank, to start from a copy of this environment on its node.

    Its first word must be this interpreter. The archive in the folder is made unless it is there.
    """
    if sys.prefix.startswith("/usr"):
        raise UsageError("--stage-env is for a virtual or conda environment, not the system's")
    files = {f"env/{path.relative_to(sys.prefix)}": path for path in _files(sys.prefix)}
    apart = sys.prefix != sys.base_prefix and not sys.base_prefix.startswith("/usr")
    if apart:
        files |= {f"base/{path.relative_to(sys.base_prefix)}": path for path in _base_files()}
    state = hashlib.sha256()
    for path in files.values():
        if path.parent.name != "__pycache__":  # which comes and goes by itself
            about = path.lstat()
            state.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
    archive = Path(folder).resolve() / f"environment-{state.hexdigest()[:16]}.tar"
    if pack and not os.path.lexists(archive):
        _pack(files, archive, apart)
    elif pack and archive.lstat().st_uid not in (0, os.getuid()):
        raise UsageError(f"--stage-env: {archive} is another user's: name a folder of your own")
    sent = _broadcast(archive, request, os.environ) if pack else ""
    return ("sh", "-c", _START, "hvdtrain", str(archive), sent, *request.program[1:])


def _broadcast(archive: Path, request: LaunchRequest, environ: Mapping[str, str]) -> str:
    """Have Slurm send an archive to the nodes of its job; return where it is there, or ""."""
    nodes, each = int(environ.get("SLURM_JOB_NUM_NODES") or 1), request.per_node
    ranks = nodes * each if each else int(environ.get("SLURM_NTASKS") or 0)
    # The first rank of a node removes it.
    if nodes == 1 or request.names_hosts or request.ranks not in (None, ranks):
        return ""
    # Jobs of one user may share a node.
    sent = f"/tmp/hvdtrain-{environ.get('SLURM_JOB_ID')}.{os.getpid()}-{archive.name}"
    with suppress(OSError):
        if subprocess.run(["sbcast", str(archive), sent], check=False).returncode == 0:
            return sent
    return ""


def _base_files() -> Iterator[Path]:
    """Yield what a virtual environment needs of the Python that it was made with."""
    standard = sysconfig.get_path("stdlib")
    left_out = {f"{sys.base_prefix}/{name}" for name in ("include", "share")}
    left_out |= {f"{standard}/test", f"{standard}/site-packages"} - set(sys.path)
    return _files(sys.base_prefix, left_out)


def _files(tree: str, left_out: Container[str] = ()) -> Iterator[Path]:
    """Yield the files and links of a tree, always in the same order."""
    for folder, folders, names in os.walk(tree):
        paths = [os.path.join(folder, name) for name in sorted(folders)]
        yield from map(Path, filter(os.path.islink, paths))
        folders[:] = [
            os.path.basename(path)
            for path in paths
            if path not in left_out and not os.path.islink(path)
        ]
        yield from (Path(folder, name) for name in sorted(names))


def _pack(files: Mapping[str, Path], archive: Path, apart: bool) -> None:
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{archive.stem}.", dir=archive.parent) as part:
            with tarfile.open(made := Path(part, archive.name), "w") as file:
                for name, path in files.items():
                    with suppress(FileNotFoundError):  # a .pyc that was written anew meanwhile
                        file.add(path, name, recursive=False)
                if apart:  # what comes last counts
                    link = tarfile.TarInfo("env/bin/python")
                    link.type, link.linkname = tarfile.SYMTYPE, f"../../base/bin/{_EXECUTABLE}"
                    file.addfile(link)
            made.chmod(0o600)
            made.replace(archive)
    except OSError as error:
        raise UsageError(f"--stage-env: cannot write {archive}: {error.strerror}") from None
