"""Hosts that ssh does not reach: found in seconds, where a launcher waits for minutes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from hvdtrain.errors import UsageError
from hvdtrain.launch.addresses import own_addresses
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.request import LaunchRequest, has_allocation

__all__ = ["require_reachable"]

_SECONDS = 10
_OPTIONS = ("-oBatchMode=yes", f"-oConnectTimeout={_SECONDS}")
_FAILED = 255  # the exit code of ssh itself
# Variables with which a user names another remote shell.
_OTHER_SHELLS = ("_agent", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP")
# What ssh could ask for in a terminal.
_ASKED = ("Permission denied", "Host key verification failed")


def require_reachable(request: LaunchRequest, environ: Mapping[str, str]) -> None:
    """Check that ssh reaches the hosts on which mpirun is to start ranks.

    Args:
        request: ranks to start, with their hosts.
        environ: environment variables of the launcher.

    Raises:
        UsageError: a host does not answer; the message names it.
    """
    if has_allocation(environ) or any(name.endswith(_OTHER_SHELLS) for name in environ):
        return
    remote = [host for host in request.hosts if not _is_here(host.name)]
    if not remote:
        return
    ssh = shutil.which("ssh", path=environ.get("PATH"))
    if ssh is None:
        raise UsageError(
            f"there is no ssh on PATH, with which ranks are started on {remote[0].name}: install "
            "an ssh client"
        )
    with ThreadPoolExecutor(max_workers=64) as pool:
        reasons = list(pool.map(lambda host: _refusal(ssh, host), remote))
    if lost := [(host.name, why) for host, why in zip(remote, reasons, strict=True) if why]:
        shown = "; ".join(f"{name} ({why})" for name, why in lost[:5])
        more = f", and {len(lost) - 5} hosts more" if len(lost) > 5 else ""
        raise UsageError(
            f"ssh does not reach {shown}{more}: correct the hosts, or see to it that "
            f"`ssh {lost[0][0]} true` works without a password"
        )


def _is_here(name: str) -> bool:
    """Return whether a name is one of this host's, on which launchers use no ssh."""
    if name in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False
    return any(address.startswith("127.") for address in found) or bool(
        found & set(own_addresses())
    )


def _refusal(ssh: str, host: Host) -> str:
    """Return why ssh does not reach a host, or ""."""
    others = dict(word.split("=", 1) for word in host.others if "=" in word)
    port = [f"-p{others['port']}"] if "port" in others else []
    name = f"{host.user}@{host.name}" if host.user else host.name
    try:
        done = subprocess.run(
            [ssh, *_OPTIONS, *port, name, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * _SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"no answer in {2 * _SECONDS} s"
    said = done.stderr.strip().splitlines() or ["no reason given"]
    if done.returncode != _FAILED:
        return ""
    if sys.stdin is not None and sys.stdin.isatty() and any(word in said[-1] for word in _ASKED):
        return ""
    return said[-1].removeprefix("ssh: ").rstrip("\r")
