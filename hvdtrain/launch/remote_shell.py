"""Hosts that ssh does not reach: found in seconds, where a launcher waits for minutes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launch.cluster_environment import own_addresses
from hvdtrain.launch.hosts.host import Host, is_here
from hvdtrain.launch.launchers.request import LaunchRequest, has_allocation

_SECONDS = 10
# A connection that is kept open for later ones would keep stderr open, too.
_OPTIONS = ("-oBatchMode=yes", "-oControlMaster=no", f"-oConnectTimeout={_SECONDS}")
_FAILED = 255  # the exit code of ssh itself
# Parts of the variables with which users name another remote shell, or options of it.
_OWN_SHELL = ("plm_rsh_", "plm_ssh_", "HYDRA_BOOTSTRAP", "HYDRA_LAUNCHER")
_SETTINGS = ("openmpi-mca-params.conf", "prte-mca-params.conf")
_OWN_SETTINGS = (".openmpi/mca-params.conf", ".prte/mca-params.conf")
# What ssh could ask for in a terminal.
_ASKED = ("Permission denied", "Host key verification failed")


def require_reachable(request: LaunchRequest, environ: Mapping[str, str]) -> None:
    """Check that ssh reaches the hosts on which mpirun is to start ranks.

    Where the launcher is set to start them otherwise, or with options of ssh, nothing is checked.
    """
    if not request.hosts or has_allocation(environ) or _has_own_shell(environ):
        return
    ssh = shutil.which("ssh", path=environ.get("PATH"))
    own = set(own_addresses())
    with ThreadPoolExecutor(max_workers=64) as pool:
        reasons = list(pool.map(lambda host: _refusal(ssh, host, own), request.hosts))
    pairs = zip(request.hosts, reasons, strict=True)
    if lost := [(host.name, why) for host, why in pairs if why]:
        raise UsageError(_message(ssh, lost))


def _message(ssh: str | None, lost: Sequence[tuple[str, str]]) -> str:
    first = lost[0][0]
    if ssh is None:
        return (
            f"there is no ssh on PATH, with which ranks are started on {first}: install an ssh "
            "client"
        )
    shown = "; ".join(f"{name} ({why})" for name, why in lost[:5])
    more = f", and {len(lost) - 5} hosts more" if len(lost) > 5 else ""
    return (
        f"ssh does not reach {shown}{more}: correct the hosts, or see to it that "
        f"`ssh {first} true` works without a password"
    )


def _has_own_shell(environ: Mapping[str, str]) -> bool:
    """Return whether a user or an administrator has set how ranks are started on other hosts."""
    if any(part in name for name in environ for part in _OWN_SHELL):
        return True
    files = [Path(environ.get("HOME", "/"), name) for name in _OWN_SETTINGS]
    if mpirun := shutil.which("mpirun", path=environ.get("PATH")):
        files += [Path(mpirun).resolve().parents[1] / "etc" / name for name in _SETTINGS]
    lines: list[str] = []
    for file in files:
        with suppress(OSError):
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
    return any(line.lstrip().startswith(("plm_", "prte_plm_")) for line in lines)


def _resolves_to_here(name: str, own: set[str]) -> bool:
    """Return whether a name is one of this host's, on which launchers use no ssh."""
    if is_here(name):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):  # the second for names that no DNS can hold
        return False
    return bool(found & own) or any(each.startswith("127.") or each == "::1" for each in found)


def _refusal(ssh: str | None, host: Host, own: set[str]) -> str:
    """Return why ssh does not reach a host, or ""."""
    if _resolves_to_here(host.name, own):
        return ""
    if ssh is None:
        return "no ssh"
    others = dict(word.split("=", 1) for word in host.others if "=" in word)
    port = [f"-p{others['port']}"] if "port" in others else []
    try:
        done = subprocess.run(
            [ssh, *_OPTIONS, *port, "--", host.login, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * _SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:  # it is connected, else ssh would have ended: a slow login
        return ""
    except OSError as error:
        return error.strerror or str(error)
    said = done.stderr.strip().splitlines() or ["no reason given"]
    if done.returncode != _FAILED:
        return ""
    if sys.stdin is not None and sys.stdin.isatty() and any(word in said[-1] for word in _ASKED):
        return ""
    return said[-1].removeprefix("ssh: ").rstrip("\r")
