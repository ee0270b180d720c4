"""The exchange as a registered custom op, for graphs that torch.compile makes of it.

While a graph is traced the tensors are fakes, so the codec is chosen then, and what lands in the graph is one op with
plain arguments: the exchange, the group's name, the direction and the codec. When the graph runs, the op compresses and
counts if a session is in scope, and takes the stock path otherwise, like the eager path. Module names are not known
while tracing, so settings that go by them (`exclude`, `recipes`) leave a compiled exchange as it is, and channels keep
their natural order, as the calibrated one is that of a module.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache

import torch
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.session import COMPRESSED, CompressionSession, Exchange, session_in_scope
from lightning_taco.dtensor.sites import Site


def trace_exchange(exchange: Exchange, session: CompressionSession) -> Tensor | None:
    """Put `exchange` into the graph that is being traced; ``None`` if it is to take the stock path."""
    if session.config.goes_by_module_name:
        return None
    # Not `session.sites`: while part of a model is compiled, the modules around it are running.
    is_backward = _compat.in_backward() and not _compat.in_checkpoint_recompute()
    site = Site("", "backward" if is_backward else "forward", False)
    codec, _ = session.choose(exchange, site)
    if codec is None:
        return None
    if codec.reshape == "calibrated":
        session.warn_once(
            "reshape='calibrated' is not available under torch.compile: compiled exchanges go in natural channel order."
        )
        codec = replace(codec, reshape="natural")
    return exchange_op(
        exchange.tensor.contiguous(),
        exchange.kind,
        exchange.op,
        exchange.dim,
        exchange.scatter_dim,
        session.group.group_name,
        session.world_size,
        site.direction,
        json.dumps(asdict(codec)),
    )


@torch.library.custom_op("lightning_taco::exchange", mutates_args=())
def exchange_op(
    tensor: Tensor,
    kind: str,
    op: str,
    dim: int,
    scatter_dim: int,
    group_name: str,
    world_size: int,
    direction: str,
    codec: str,
) -> Tensor:
    """Run the exchange and count it."""
    group = _compat.resolve_group(group_name)
    session = session_in_scope(group)
    if session is None:
        return _compat.stock_exchange(tensor, kind, op, dim, scatter_dim, group)
    exchange = Exchange(kind=kind, tensor=tensor, op=op, dim=dim, scatter_dim=scatter_dim)  # type: ignore[arg-type]
    site, settings = Site("", direction, False), _codec(codec)  # type: ignore[arg-type]
    session.record(exchange, site, settings, COMPRESSED)
    session.observe(exchange, site, settings)
    return exchange.run(settings, group, session.seed(exchange.kind, site))


@exchange_op.register_fake
def _(
    tensor: Tensor,
    kind: str,
    op: str,
    dim: int,
    scatter_dim: int,
    group_name: str,
    world_size: int,
    direction: str,
    codec: str,
) -> Tensor:
    shape = list(tensor.shape)
    if kind == "reduce_scatter":
        shape[dim] //= world_size
    elif kind == "all_gather":
        shape[dim] *= world_size
    elif kind == "all_to_all":
        shape[scatter_dim] //= world_size
        shape[dim] *= world_size
    return tensor.new_empty(shape)


@lru_cache(maxsize=64)
def _codec(text: str) -> CodecConfig:
    return CodecConfig(**json.loads(text))
