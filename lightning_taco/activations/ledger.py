"""What one forward stored, by module and kind, beside what stock autograd would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

KINDS = ("norm", "activation", "linear", "kept", "hooked", "attention", "other")
"""Whose saved tensors they are. ``"kept"`` is the input of a linear layer that shares memory with what the operation
before keeps anyway; ``"attention"`` and ``"other"`` are seen by `measure_stored` only."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of saved tensors, each counted once however often it is saved."""

    stock_bytes: int = 0
    stored_bytes: int = 0
    num_tensors: int = 0

    def __add__(self, other: StoredBytes) -> StoredBytes:
        return StoredBytes(
            self.stock_bytes + other.stock_bytes,
            self.stored_bytes + other.stored_bytes,
            self.num_tensors + other.num_tensors,
        )

    @property
    def ratio(self) -> float:
        """Stock over stored; 1 where there is nothing."""
        if self.stored_bytes == 0:
            return float("inf") if self.stock_bytes else 1.0
        return self.stock_bytes / self.stored_bytes


class Ledger:
    """Adds up what is stored, by module and kind."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], StoredBytes] = {}

    def add(self, module: str, kind: str, stock_bytes: int, stored_bytes: int) -> None:
        """Count one tensor."""
        key = (module, kind)
        self.rows[key] = self.rows.get(key, StoredBytes()) + StoredBytes(stock_bytes, stored_bytes, 1)

    def clear(self) -> None:
        """Count anew."""
        self.rows = {}

    @property
    def total(self) -> StoredBytes:
        """All rows together."""
        return _sum(self.rows.values())

    def by_kind(self) -> dict[str, StoredBytes]:
        """Sums over modules, in the order of `KINDS`."""
        grouped = self._grouped(lambda module, kind: kind)
        return {kind: grouped[kind] for kind in KINDS if kind in grouped}

    def by_layer(self) -> dict[str, StoredBytes]:
        """Sums over the modules of a layer: paths up to and with their first number (``"blocks.3"``)."""
        return self._grouped(lambda module, kind: layer_of(module))

    def _grouped(self, key: Callable[[str, str], str]) -> dict[str, StoredBytes]:
        groups: dict[str, StoredBytes] = {}
        for (module, kind), row in self.rows.items():
            name = key(module, kind)
            groups[name] = groups.get(name, StoredBytes()) + row
        return groups


def layer_of(module: str) -> str:
    """The path of the layer that a module belongs to.

    >>> layer_of("model.blocks.3.mlp.up"), layer_of("model.head")
    ('model.blocks.3', 'model.head')
    """
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return module


def _sum(rows: Iterable[StoredBytes]) -> StoredBytes:
    return sum(rows, StoredBytes())
