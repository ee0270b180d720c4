"""Where DTensor's redistribution meets the compressed collectives.

Placements look functional collectives up in one module global, ``torch.distributed.tensor.placement_types.funcol``;
`install` puts a stand-in there that passes everything on, except all-reduce, reduce-scatter and all-gather over a group
that has a session in scope. Four names beside it complete the seam: the all-to-all of a change of sharded dim, and
``DTensor.full_tensor``, ``DTensor.redistribute`` and what an operation redistributes of its own accord, which are exact
for parameters.

Every strategy installs and removes; the names are patched while at least one has. Nothing is compressed outside a
session's scope, whoever else uses DTensor in the process.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed.tensor._dispatch as _dispatch
import torch.distributed.tensor.placement_types as placement_types
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_taco import _compat
from lightning_taco.dtensor import traced
from lightning_taco.dtensor.exchange import Exchange
from lightning_taco.dtensor.outcomes import PARAMETER_REASON
from lightning_taco.dtensor.scopes import (
    any_attached,
    bypass,
    session_for_tracing,
    session_in_scope,
    sessions_in_scope,
)

LOSS_MODULE = "torch.distributed.tensor.parallel.loss"
FSDP_PACKAGE = "torch.distributed.fsdp"
NORM_PLACEMENT = "_NormPartial"
REDISTRIBUTION = "redistribute_local_tensor"
MAX_DEPTH = 4
"""Frames from a collective to the redistribution that asks for it."""

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
        (_dispatch, "redistribute_local_tensor", _exact_for_parameter_operands),
    )


class _FunctionalCollectives:
    """Stands in for ``torch.distributed._functional_collectives`` in the module that defines placements."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def all_reduce(self, tensor: Tensor, reduceOp: str, group: Any, tag: str = "") -> Tensor:
        stock = functools.partial(self._stock.all_reduce, tensor, reduceOp, group, tag)
        if not any_attached():
            return stock()
        caller = sys._getframe(1)
        exchange = Exchange(
            kind="all_reduce",
            tensor=tensor,
            op=reduceOp.lower(),
            is_scalar_like=_is_loss_or_norm(caller),
        )
        return _run(exchange, group, stock, caller)

    def _reduce_scatter(
        self, name: str, tensor: Tensor, reduceOp: str, scatter_dim: int, group: Any, tag: str = ""
    ) -> Tensor:
        stock = functools.partial(getattr(self._stock, name), tensor, reduceOp, scatter_dim, group, tag)
        if not any_attached():
            return stock()
        caller = sys._getframe(1)
        exchange = Exchange(
            kind="reduce_scatter",
            tensor=tensor,
            op=reduceOp.lower(),
            dim=scatter_dim,
            is_scalar_like=_is_loss_or_norm(caller),
        )
        return _run(exchange, group, stock, caller)

    def _all_gather(self, name: str, tensor: Tensor, gather_dim: int, group: Any, tag: str = "") -> Tensor:
        stock = functools.partial(getattr(self._stock, name), tensor, gather_dim, group, tag)
        if not any_attached():
            return stock()
        return _run(Exchange(kind="all_gather", tensor=tensor, dim=gather_dim), group, stock, sys._getframe(1))

    # torch up to 2.12, and from 2.13 on
    reduce_scatter_tensor = functools.partialmethod(_reduce_scatter, "reduce_scatter_tensor")
    reduce_scatter_single = functools.partialmethod(_reduce_scatter, "reduce_scatter_single")
    all_gather_tensor = functools.partialmethod(_all_gather, "all_gather_tensor")
    all_gather_single = functools.partialmethod(_all_gather, "all_gather_single")


def _is_loss_or_norm(frame: FrameType | None) -> bool:
    """Whether the placement's method in `frame` belongs to a norm, or is called by a vocabulary-parallel loss.

    The reduction itself does not tell: to the collective both are sums.
    """
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == LOSS_MODULE:
            return True
        if type(frame.f_locals.get("self")).__name__ == NORM_PLACEMENT:
            return True
        frame = frame.f_back
    return False


def _is_async(frame: FrameType | None) -> bool:
    """Whether the redistribution that called the placement's method in `frame` hands back what is on its way.

    DTensor's redistribution waits by itself for what it is not to hand back so. An all-gather is asked for by a method
    that first works on its result where shards are uneven, which waits.
    """
    for _ in range(MAX_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == REDISTRIBUTION:
            return bool(frame.f_locals.get("async_op", False))
        frame = frame.f_back
    return False


def _shard_dim_alltoall(input: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
    stock = functools.partial(_originals["shard_dim_alltoall"], input, gather_dim, shard_dim, mesh, mesh_dim)
    exchange = Exchange(kind="all_to_all", tensor=input, dim=gather_dim, scatter_dim=shard_dim)
    return _run(exchange, (mesh, mesh_dim), stock)


def _run(exchange: Exchange, group: Any, stock: Callable[[], Tensor], caller: FrameType | None = None) -> Tensor:
    process_group = _compat.process_group(group) if any_attached() else None
    if process_group is None:
        return stock()
    if _compat.is_tracing():
        session = session_for_tracing(process_group)
        result = None if session is None else traced.trace_exchange(exchange, session)
        return stock() if result is None else result
    session = session_in_scope(process_group)
    if session is None:
        return stock()
    if session.config.asynchronous and _is_async(caller):
        exchange = replace(exchange, is_async=True)
    return session.exchange(exchange, stock)


def _exact_full_tensor(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        if not any_attached() or torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        with bypass("full_tensor()"):
            return original(self, *args, **kwargs)

    return full_tensor


def _exact_for_parameters(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """Parameters, and gradients of parameters that FSDP2 brings to their parameter's placements within backward."""

    @functools.wraps(original)
    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        if not any_attached() or torch.compiler.is_dynamo_compiling():
            return original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not _compat.is_parameter(self) and not caller.startswith(FSDP_PACKAGE):
            return original(self, *args, **kwargs)
        with bypass(PARAMETER_REASON):
            return original(self, *args, **kwargs)

    return redistribute


def _exact_for_parameter_operands(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What an operation redistributes of its own accord: a parameter is known by its memory, before it is copied."""

    @functools.wraps(original)
    def redistribute_local_tensor(local_tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not any(session.holds_parameter(local_tensor) for session in sessions_in_scope()):
            return original(local_tensor, *args, **kwargs)
        with bypass(PARAMETER_REASON):
            return original(local_tensor, *args, **kwargs)

    return redistribute_local_tensor
