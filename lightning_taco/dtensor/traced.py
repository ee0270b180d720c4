"""The exchange as a registered custom op, for graphs that torch.compile makes of it.

While a graph is traced, the session in scope decides from shapes, dtypes and settings whether the exchange is one to
compress; what lands in the graph then is one op with plain arguments: the exchange, the group's name and the direction.
When the graph runs, the op asks the session that is in scope, like the eager path: so other settings between two steps,
and suspensions, hold for graphs that exist. Without a session it takes the stock path.

Module names are not known in a graph, so settings that go by them (`exclude`, `recipes`) leave a compiled exchange as
it is, channels keep their natural order, as the calibrated one is that of a module, and to suspensions all compiled
exchanges of one direction and kind are one site, of the name ``""``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.exchange import Exchange
from lightning_taco.dtensor.scopes import session_in_scope
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site

BY_NAME_REASON = "compiled: settings go by module names, which are not known"


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
    return exchange_op(
        exchange.tensor.contiguous(),
        exchange.kind,
        exchange.op,
        exchange.dim,
        exchange.scatter_dim,
        session.group.group_name,
        session.world_size,
        site.direction,
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
) -> Tensor:
    """Run the exchange by the settings of the session in scope, and count it."""
    group = _compat.resolve_group(group_name)
    session = session_in_scope(group)
    if session is None:
        return _compat.stock_exchange(tensor, kind, op, dim, scatter_dim, group)
    exchange = Exchange(kind=kind, tensor=tensor, op=op, dim=dim, scatter_dim=scatter_dim)  # type: ignore[arg-type]
    site = Site("", direction, False)  # type: ignore[arg-type]
    codec, outcome = session.choose(exchange, site)
    if codec is not None and session.config.goes_by_module_name:
        codec, outcome = None, BY_NAME_REASON
    exchange = session.by_measurement(exchange, codec)
    suspended = None if codec is None else session.suspended_outcome(exchange.kind, site)
    session.record(exchange, site, codec if suspended is None else None, suspended or outcome)
    if codec is None:
        return _compat.stock_exchange(tensor, kind, op, dim, scatter_dim, group)
    codec = _in_natural_order(codec)
    if suspended is not None:
        session.observe_suspended(exchange, site, codec)
        return _compat.stock_exchange(tensor, kind, op, dim, scatter_dim, group)
    session.observe(exchange, site, codec)
    return exchange.run(codec, group, session.seed(exchange.kind, site), session.memory)


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
def _in_natural_order(codec: CodecConfig) -> CodecConfig:
    return replace(codec, reshape="natural")
