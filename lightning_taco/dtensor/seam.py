"""Where DTensor's redistribution meets the compressed collectives.

Placements look functional collectives up in one module global, ``torch.distributed.tensor.placement_types.funcol``;
`install` puts a stand-in there that passes everything on, except all-reduce, reduce-scatter and all-gather over a group
that has a session in scope. Three names beside it complete the seam: the all-to-all of a change of sharded dim,
``DTensor.full_tensor`` and ``DTensor.redistribute`` of a parameter, which are always exact.

Every strategy installs and removes; the names are patched while at least one has. Nothing is compressed outside a
session's scope, whoever else uses DTensor in the process.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed.tensor.placement_types as placement_types
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_taco import _compat
from lightning_taco.dtensor import traced
from lightning_taco.dtensor.session import (
    CompressionSession,
    Exchange,
    any_in_scope,
    bypass,
    session_in_scope,
)

LOSS_MODULE = "torch.distributed.tensor.parallel.loss"
FSDP_PACKAGE = "torch.distributed.fsdp"

_lock = threading.Lock()
_num_installed = 0
_originals: dict[str, Any] = {}


def install() -> None:
    """Patch the seam, or count one more user of it.

    Raises:
        RuntimeError: under a torch whose redistribution is not known, naming the supported range.
    """
    global _num_installed
    _compat.require_known_torch()
    with _lock:
        if _num_installed == 0:
            _patch()
        _num_installed += 1


def remove() -> None:
    """Undo one `install`; the last one restores every name."""
    global _num_installed
    with _lock:
        if _num_installed == 0:
            return
        _num_installed -= 1
        if _num_installed == 0:
            _restore()


def is_installed() -> bool:
    """Whether the seam is patched."""
    return _num_installed > 0


def _patch() -> None:
    for owner, name, make in _replacements():
        _originals[name] = getattr(owner, name)
        setattr(owner, name, make(_originals[name]))


def _restore() -> None:
    for owner, name, _ in _replacements():
        setattr(owner, name, _originals.pop(name))


def _replacements() -> tuple[tuple[Any, str, Callable[[Any], Any]], ...]:
    """What is patched: the owner of a name, the name, and what makes the stand-in out of the original."""
    return (
        (placement_types, "funcol", _FunctionalCollectives),
        (placement_types, "shard_dim_alltoall", lambda _: _shard_dim_alltoall),
        (DTensor, "full_tensor", _exact_full_tensor),
        (DTensor, "redistribute", _exact_for_parameters),
    )


class _FunctionalCollectives:
    """Stands in for ``torch.distributed._functional_collectives`` in the module that defines placements."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def all_reduce(self, tensor: Tensor, reduceOp: str, group: Any, tag: str = "") -> Tensor:
        stock = functools.partial(self._stock.all_reduce, tensor, reduceOp, group, tag)
        if not any_in_scope():
            return stock()
        # Called by Partial._reduce_value, which a vocabulary-parallel loss calls directly.
        is_loss = sys._getframe(2).f_globals.get("__name__") == LOSS_MODULE
        exchange = Exchange(kind="all_reduce", tensor=tensor, op=reduceOp.lower(), is_loss=is_loss)
        return _run(exchange, group, stock)

    def _reduce_scatter(
        self, name: str, tensor: Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
    ) -> Tensor:
        stock = functools.partial(getattr(self._stock, name), tensor, reduceOp, scatter_dim, group, tag)
        return _run(Exchange(kind="reduce_scatter", tensor=tensor, op=reduceOp.lower(), dim=scatter_dim), group, stock)

    def _all_gather(self, name: str, tensor: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
        stock = functools.partial(getattr(self._stock, name), tensor, gather_dim, group, tag)
        return _run(Exchange(kind="all_gather", tensor=tensor, dim=gather_dim), group, stock)

    # torch up to 2.12, and from 2.13 on
    reduce_scatter_tensor = functools.partialmethod(_reduce_scatter, "reduce_scatter_tensor")
    reduce_scatter_single = functools.partialmethod(_reduce_scatter, "reduce_scatter_single")
    all_gather_tensor = functools.partialmethod(_all_gather, "all_gather_tensor")
    all_gather_single = functools.partialmethod(_all_gather, "all_gather_single")


def _shard_dim_alltoall(input: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
    stock = functools.partial(_originals["shard_dim_alltoall"], input, gather_dim, shard_dim, mesh, mesh_dim)
    exchange = Exchange(kind="all_to_all", tensor=input, dim=gather_dim, scatter_dim=shard_dim)
    return _run(exchange, (mesh, mesh_dim), stock)


def _run(exchange: Exchange, group: Any, stock: Callable[[], Tensor]) -> Tensor:
    session = _session(group) if any_in_scope() else None
    if session is None:
        return stock()
    if _compat.is_tracing():
        result = traced.trace_exchange(exchange, session)
        return stock() if result is None else result
    return session.exchange(exchange, stock)


def _session(group: Any) -> CompressionSession | None:
    process_group = _compat.process_group(group)
    return None if process_group is None else session_in_scope(process_group)


def _exact_full_tensor(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        if not any_in_scope() or _compat.is_tracing():
            return original(self, *args, **kwargs)
        with bypass("full_tensor()"):
            return original(self, *args, **kwargs)

    return full_tensor


def _exact_for_parameters(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Parameters, and gradients of parameters that FSDP2 brings to their parameter's placements within backward."""

    @functools.wraps(original)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if not any_in_scope() or _compat.is_tracing():
            return original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not isinstance(self, nn.Parameter) and not caller.startswith(FSDP_PACKAGE):
            return original(self, *args, **kwargs)
        with bypass("parameter or its gradient"):
            return original(self, *args, **kwargs)

    return redistribute
