"""The environment variables in which frameworks find their ranks. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from hvdtrain.errors import UsageError

# Few enough digits that the list of roles fits into memory.
_COUNT = re.compile("[0-9]{1,7}")
_ROLES = ("chief", "worker", "ps", "evaluator")


class RankFacts(TypedDict):
    """The JSON object that a rank prints about itself: the fields of ClusterRank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    addresses: list[str]
    control_addresses: list[str]


@dataclass(frozen=True)
class ClusterRank:
    """The place of this rank in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    addresses: tuple[str, ...]
    control_addresses: tuple[str, ...] = ()

    @classmethod
    def from_facts(cls, facts: RankFacts) -> ClusterRank:
        """Return the information that a rank has printed as JSON."""
        return cls(
            facts["rank"],
            facts["size"],
            facts["local_rank"],
            facts["local_size"],
            facts["node"],
            tuple(facts["addresses"]),
            tuple(facts["control_addresses"]),
        )


def torch_variables(place: ClusterRank) -> dict[str, str]:
    """Return the variables of `init_method="env://"`, which Accelerate and Lightning read too."""
    host, _, port = place.addresses[0].rpartition(":")
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "NODE_RANK": place.node,
        "GROUP_RANK": place.node,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def jax_variables(place: ClusterRank) -> dict[str, str]:
    """Return the variables of `jax.distributed.initialize` and `keras.distribution.initialize`."""
    coordinator = place.addresses[0]
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": coordinator,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(place.size),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(place.rank),
    }


def parse_roles(text: str) -> list[str]:
    """Return the role of each rank: "chief:1,worker:2" is chief, worker, worker."""
    roles: list[str] = []
    for part in text.split(","):
        role, _, count = part.strip().partition(":")
        if role not in _ROLES or not _COUNT.fullmatch(count):
            known = ", ".join(_ROLES)
            raise UsageError(f"--roles: {part!r} must be one of {known}, a colon, and a number")
        roles += [role] * int(count)
    if roles.count("chief") > 1 or roles.count("evaluator") > 1:
        raise UsageError(f"--roles {text}: there can be one chief and one evaluator only")
    return roles


def check_roles(roles: Sequence[str], size: int) -> None:
    """Check that each rank has a role."""
    if len(roles) != size:
        raise UsageError(f"--roles are of {len(roles)} ranks, but there are {size}")


def tensorflow_config(place: ClusterRank, roles: Sequence[str]) -> str:
    """Return TF_CONFIG, in whose cluster evaluators are not members."""
    members: dict[str, list[str]] = {}
    for role, address in zip(roles, place.addresses, strict=True):
        if role != "evaluator":
            members.setdefault(role, []).append(address)
    role = roles[place.rank]
    task = {"type": role, "index": list(roles[: place.rank]).count(role)}
    return json.dumps({"cluster": members, "task": task})
