"""One redistribution of a tensor over the tensor-parallel axis: what DTensor asks for, and how it is run compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec import VALUE_DTYPES
from lightning_taco.collectives.algorithms import Algorithm
from lightning_taco.collectives.algorithms import exchange as run_exchange
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.traffic import Direction, Kind
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.sites import Site

REDUCING_KINDS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Exchange:
    """One redistribution of a local tensor over the tensor-parallel axis, as DTensor asks for it."""

    kind: Kind
    tensor: Tensor
    op: str = "sum"
    """Reduction of an all-reduce or a reduce-scatter."""
    dim: int = 0
    """The dim along which shards are joined (all-gather, all-to-all) or cut (reduce-scatter)."""
    scatter_dim: int = 0
    """The dim that an all-to-all cuts."""
    is_scalar_like: bool = False
    """Whether it is part of a vocabulary-parallel loss or of a norm, which are always exact."""
    is_async: bool = False
    """Whether the result is handed back while it is on its way."""
    algorithm: Algorithm | None = None
    """By which it goes when it is compressed; ``None``: by default."""
    ranks: Hierarchy | None = None
    """Of a group that spans hosts, for the algorithm that goes by them."""

    @property
    def resharded_dims(self) -> tuple[int, ...]:
        """The dims that it cuts or joins: of these a rank holds, before or after, a part."""
        if self.kind == "all_reduce":
            return ()
        return (self.dim, self.scatter_dim) if self.kind == "all_to_all" else (self.dim,)

    def full_bytes(self, num_ranks: int) -> int:
        """Of the whole tensor, before compression."""
        num_shards = num_ranks if self.kind == "all_gather" else 1
        return self.tensor.numel() * self.tensor.element_size() * num_shards

    def run(
        self, codec: CodecConfig, group: dist.ProcessGroup, seed: int = 0, memory: PeerMemory | None = None
    ) -> Tensor:
        """Exchange the tensor, compressed; over `memory` if there is one."""
        return run_exchange(
            self.kind,
            self.tensor,
            codec,
            group,
            algorithm=self.algorithm,
            ranks=self.ranks,
            memory=memory,
            op=self.op,
            dim=self.dim,
            scatter_dim=self.scatter_dim,
            seed=seed,
        )

    def why_never_compressed(self) -> str | None:
        """Why it goes as it is under any settings; ``None`` where settings decide. By shapes and dtypes only."""
        tensor = self.tensor
        if tensor.dtype not in VALUE_DTYPES:
            return f"dtype {str(tensor.dtype).removeprefix('torch.')}"
        if self.kind in REDUCING_KINDS and self.op not in ("sum", "avg"):
            return f"reduction {self.op}"
        if self.is_scalar_like or tensor.dim() < 2 or tensor.shape[-1] == 1:
            return "loss, norm or bias (no feature dim)"
        return None


class SiteKey(NamedTuple):
    """One kind of exchange of one module in one direction."""

    site: str
    direction: Direction
    kind: Kind

    @classmethod
    def of(cls, exchange: Exchange, site: Site) -> SiteKey:
        """That of an exchange at a site."""
        return cls(site.name, site.direction, exchange.kind)


Observer = Callable[[Exchange, Site, CodecConfig], None]
