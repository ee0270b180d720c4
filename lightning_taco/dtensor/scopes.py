"""Which sessions of this process are in scope, and where even those send everything as it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from lightning_taco.dtensor.session import CompressionSession


class _Bypass(threading.local):
    reason: str | None = None


_BYPASS = _Bypass()


def bypass_reason() -> str | None:
    """Of the innermost `bypass` that runs in this thread; ``None`` outside of any."""
    return _BYPASS.reason


@contextmanager
def bypass(reason: str) -> Iterator[None]:
    """Send everything as it is while the block runs, in this thread; `reason` is what the counters say."""
    previous = _BYPASS.reason
    _BYPASS.reason = reason
    try:
        yield
    finally:
        _BYPASS.reason = previous


# Sessions in scope, innermost last. Process-wide, since autograd's threads must see them too; a session is found by its
# group, so strategies (and, in tests, ranks that are threads) do not meet.
_IN_SCOPE: list[CompressionSession] = []
_ATTACHED: list[CompressionSession] = []
_SCOPE_LOCK = threading.Lock()


def attach(session: CompressionSession) -> None:
    """Note that `session` follows a module."""
    with _SCOPE_LOCK:
        if session not in _ATTACHED:
            _ATTACHED.append(session)


def detach(session: CompressionSession) -> None:
    """Note that it follows none any more."""
    with _SCOPE_LOCK:
        if session in _ATTACHED:
            _ATTACHED.remove(session)


def enter_scope(session: CompressionSession) -> None:
    """Put `session` in scope once more."""
    with _SCOPE_LOCK:
        _IN_SCOPE.append(session)


def leave_scope(session: CompressionSession) -> None:
    """Take `session` out of scope once."""
    with _SCOPE_LOCK:
        for index in range(len(_IN_SCOPE) - 1, -1, -1):
            if _IN_SCOPE[index] is session:
                del _IN_SCOPE[index]
                return


def sessions_in_scope() -> tuple[CompressionSession, ...]:
    """All sessions in scope, innermost last."""
    return tuple(_IN_SCOPE)


def session_in_scope(group: dist.ProcessGroup) -> CompressionSession | None:
    """The innermost session in scope on `group`."""
    return _last_on(group, _IN_SCOPE)


def session_for_tracing(group: dist.ProcessGroup) -> CompressionSession | None:
    """The session whose settings a graph that is traced now is made for: a graph outlives the scope it is traced in."""
    return _last_on(group, _IN_SCOPE) or _last_on(group, _ATTACHED)


def any_attached() -> bool:
    """Whether any session of this process is in scope or follows a module."""
    return bool(_IN_SCOPE or _ATTACHED)


def _last_on(group: dist.ProcessGroup, sessions: list[CompressionSession]) -> CompressionSession | None:
    """The last session on `group`, or else on another group of the same ranks in the same order.

    DTensor keeps redistributions that it has planned once: in a second run of one process it may ask for an exchange
    over the first run's group.
    """
    exact = next((session for session in reversed(sessions) if session.group == group), None)
    if exact is not None or not sessions:
        return exact
    place = _place(group)
    return next((session for session in reversed(sessions) if _place(session.group) == place), None)


def _place(group: dist.ProcessGroup) -> tuple[int, tuple[int, ...]]:
    """This process's place in `group`, and the ranks of it: what tells groups of ranks that are threads apart, too."""
    return group.rank(), tuple(dist.get_process_group_ranks(group))
