"""On what exchanges were timed: figures of another machine, or of the same one set up otherwise, do not hold."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from lightning_taco import _compat
from lightning_taco.collectives.algorithms import Algorithm, MeasuredKind, algorithms_of
from lightning_taco.collectives.calibration import measuring_dtype
from lightning_taco.collectives.hierarchy import host_size

NETWORK_PREFIXES = ("NCCL_", "GLOO_")
IRRELEVANT = ("NCCL_DEBUG", "NCCL_VERSION", "NCCL_ASYNC_ERROR_HANDLING")
"""Beginnings of variables that do not change how fast it goes; launchers and images set some."""


@dataclass(frozen=True)
class Topology:
    """What decides how fast a group exchanges. Two that are equal share their break-even sizes.

    Attributes:
        machine: name of the first rank's host.
        num_ranks: of the group.
        layout: which rank is on which host, as ``"0 0 1 1"``.
        device: name of the GPU, or the kind of CPU; of several kinds, all of them.
        backend: of the process group.
        dtype: of the values that were exchanged.
        versions: of torch and NCCL.
        network: variables of the environment that choose links, such as ``NCCL_P2P_DISABLE=1``.
        has_peer_memory: whether the ranks have mapped each other's memory.
    """

    machine: str
    num_ranks: int
    layout: str
    device: str
    backend: str
    dtype: str
    versions: str
    network: str
    has_peer_memory: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, has_peer_memory: bool = False) -> Topology:
        """That of `group`, the same on all its ranks; `device` is this rank's. One gathering of short texts."""
        gathered: list[Any] = [None] * group.size()
        own = (platform.node(), device_name(device), _versions(device), _network(os.environ))
        dist.all_gather_object(gathered, own, group=group)
        hosts, devices, versions, networks = zip(*gathered, strict=True)
        places = list(dict.fromkeys(hosts))
        return cls(
            machine=hosts[0],
            num_ranks=group.size(),
            layout=" ".join(str(places.index(host)) for host in hosts),
            device=_together(devices),
            backend=str(dist.get_backend(group)),
            dtype=str(measuring_dtype(device)).removeprefix("torch."),
            versions=_together(versions),
            network=_together(networks),
            has_peer_memory=has_peer_memory,
        )

    @classmethod
    def from_json(cls, content: Any) -> Topology:
        """That which `to_json` gave.

        Raises:
            ValueError: for anything else.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(content, Mapping) or set(content) != names:
            raise ValueError(f"its topology does not have the fields {', '.join(sorted(names))}")
        return cls(**content)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def algorithms(self, kind: MeasuredKind) -> tuple[Algorithm, ...]:
        """Those that such a group can exchange by."""
        return algorithms_of(
            kind,
            self.num_ranks,
            host_size(self.layout.split()) is not None,
            overlaps="nccl" in self.backend,
            has_peer_memory=self.has_peer_memory,
        )

    def difference(self, other: Topology) -> str | None:
        """In what `other` differs, in words; ``None`` where it does not."""
        mine, others = asdict(self), asdict(other)
        found = [f"{name} {mine[name]!r}, here {others[name]!r}" for name in mine if mine[name] != others[name]]
        return "; ".join(found) or None

    def __str__(self) -> str:
        network = f", {self.network}" if self.network else ""
        memory = ", mapped memory" if self.has_peer_memory else ""
        return (
            f"{self.num_ranks} ranks, {self.backend} on {self.device}{memory}, {self.dtype}, {self.versions}{network}"
        )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _versions(device: torch.device) -> str:
    return ", ".join(f"{name} {version}" for name, version in _compat.library_versions(device).items())


def _network(environment: Mapping[str, str]) -> str:
    names = sorted(name for name in environment if name.startswith(NETWORK_PREFIXES))
    return " ".join(f"{name}={environment[name]}" for name in names if not name.startswith(IRRELEVANT))


def _together(texts: tuple[str, ...]) -> str:
    return " / ".join(dict.fromkeys(texts))
