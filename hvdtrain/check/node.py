"""The program of `check --job` on each node: it prints facts, and becomes the probe of links."""

import json
import os
import platform
import re
import socket
import sys
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.check.checks import check_packages, interfaces, node_advice
from hvdtrain.control_groups import find_memory, read_file
from hvdtrain.devices import MASKS
from hvdtrain.topology import count_threads
from hvdtrain.world import promised_world

_DRIVERS = Path("/sys/bus/pci/drivers")


def main(seconds: str, ranks_per_node: str) -> None:
    """Print the facts of this rank as JSON, before MPI, which may hang."""
    promised = promised_world(os.environ)
    rank = promised.rank if promised else 0
    status = Path("/proc/self/status").read_text(encoding="ascii")
    processors, packages = read_file(Path("/proc/cpuinfo")) or "", check_packages().facts
    facts = {
        "rank": rank,
        "host": socket.gethostname(),
        "versions": {"Python": platform.python_version(), "hvdtrain": __version__, **packages},
        "machine": {
            "CPU": (re.findall(r"model name\s*: (.*)", processors) or [platform.machine()])[0],
            "cores": os.cpu_count(),
            # As installed: equal nodes have left a little more or less of it.
            "memory": f"{-(-find_memory().machine_bytes // 2**34) * 16} GiB",
        },
        "bound_to": re.findall(r"Cpus_allowed_list:\s*(.*)", status)[0],
        "threads": count_threads(os.environ, {}),
        "near_gpus": [] if os.environ.keys() & set(MASKS) else cores_near_gpus(_DRIVERS),
        "advice": node_advice(ranks_per_node),
    }
    print(json.dumps(facts), flush=True)
    names = sorted(interfaces(os.environ, Path("/sys/class/net")))
    words = ["-m", "hvdtrain.probes", "links", seconds, str(rank), *names]
    os.execv(sys.executable, [sys.executable, *words])


def cores_near_gpus(drivers: Path) -> list[str]:
    """Return the cores near each GPU, in the order of GPUs; `drivers` is a folder of Linux."""
    files = sorted(drivers.glob("[na][vm][id]*/*:*/local_cpulist"))  # nvidia and amdgpu
    return [read_file(file) or "" for file in files]


if __name__ == "__main__":
    main(*sys.argv[1:])
