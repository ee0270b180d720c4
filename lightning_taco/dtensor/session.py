"""One strategy's compression: what it compresses, for which group, when, and what it has sent."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_taco import _compat
from lightning_taco.codec import VALUE_DTYPES
from lightning_taco.collectives.algorithms import Algorithm, sent_bytes
from lightning_taco.collectives.algorithms import exchange as run_exchange
from lightning_taco.collectives.break_even import BreakEven
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.traffic import (
    Direction,
    Kind,
    TrafficCounters,
    TrafficKey,
    stock_sent_bytes,
)
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor.channel_order import ChannelOrder, ChannelOrders
from lightning_taco.dtensor.sites import ModuleSites, Site
from lightning_taco.dtensor.suspensions import SUSPENDED_PREFIX, SiteKey, Suspensions

logger = logging.getLogger(__name__)

COMPRESSED = "compressed"
PARAMETER_REASON = "parameter or its gradient"
REDUCING_KINDS = ("all_reduce", "reduce_scatter")
CODEC_SETTINGS = ("forward", "backward", "exclude", "recipes")


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


Observer = Callable[[Exchange, Site, CodecConfig], None]


class CompressionSession:
    """What one strategy compresses on its tensor-parallel group.

    Args:
        config: the settings.
        group: the ranks of the tensor-parallel axis.
        element: what ``element="auto"`` means on these ranks, agreed between them.
        replicas: the ranks that are at this rank's place in every replica of the model (the data-parallel axis), whose
            channel orders are the same; ``None`` for one replica.
        inform: called on every rank with a line for the user.
        warn: the same, for what the user should look into.

    Attributes:
        traffic: what this rank sent while the session was in scope.
        observers: called before each compressed exchange with the exchange as it is encoded (channels in their
            calibrated order), its site and its codec; recomputed forwards are left out. They may look at the tensor and
            must not change or synchronise anything.
        trial_observers: called in the same way before each exchange that is suspended, with the codec that it would
            have: so a suspended site is measured without harm to the run.
        break_even: what was measured of the group, by which ``min_bytes="auto"`` goes; the same on all ranks.
        hierarchy: of a group that spans hosts, for algorithms that were measured.
        memory: what the group's GPUs have mapped of each other; ``None`` to go over the process group.
        step: training steps begun; part of the seed of stochastic rounding.
        microbatch: of the step, which runs now; another part of it.
        channel_orders: the orders of codecs with ``reshape="calibrated"``; ``None`` when there is no such codec.
    """

    def __init__(
        self,
        config: CompressionConfig,
        group: dist.ProcessGroup,
        element: Literal["e4m3", "int8"] = "e4m3",
        *,
        replicas: dist.ProcessGroup | None = None,
        inform: Callable[[str], None] = logger.info,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.config = config
        self.group = group
        self.replicas = replicas
        self.element = element
        self.traffic = TrafficCounters()
        self.sites = ModuleSites()
        self.observers: list[Observer] = []
        self.trial_observers: list[Observer] = []
        self.break_even = BreakEven.of(())
        self.hierarchy: Hierarchy | None = None
        self.memory: PeerMemory | None = None
        self.step = 0
        self.microbatch = 0
        self._inform = inform
        self.channel_orders = self._new_channel_orders()
        self._suspensions = Suspensions()
        self._next_settings: tuple[CompressionConfig, Literal["e4m3", "int8"]] | None = None
        self._opened_with = settings_in_words(config, element)
        self._saved_orders: tuple[dict[str, str], Mapping[str, Any]] | None = None  # of settings not yet switched to
        self._warn = warn
        self._warnings: set[str] = set()
        self._is_training_forward = False
        self._codecs: dict[tuple[str, Direction], CodecConfig | None] = {}
        self._parameter_storages: set[int] = set()

    @property
    def world_size(self) -> int:
        """Ranks of the tensor-parallel group."""
        return self.group.size()

    def attach(self, module: nn.Module) -> None:
        """Follow `module` too: its exchanges know their site, and its parameters are known."""
        self.sites.attach(module)
        with _SCOPE_LOCK:
            if self not in _ATTACHED:
                _ATTACHED.append(self)
        self._parameter_storages |= {_storage(parameter) for parameter in module.parameters()} - {0}

    def detach(self) -> None:
        """Remove every hook from the module."""
        with _SCOPE_LOCK:
            if self in _ATTACHED:
                _ATTACHED.remove(self)
        self.sites.detach()
        self._parameter_storages = set()
        self.observers.clear()
        self.trial_observers.clear()

    @contextmanager
    def scope(self, *, is_new_step: bool = False) -> Iterator[None]:
        """Compress what DTensor redistributes over the group while the block runs, in every thread.

        Args:
            is_new_step: whether it is the forward of a training step, with which a new step begins. All ranks begin it
                together. A forward that is computed again within backward is part of the step that it belongs to.
        """
        if is_new_step and not _compat.in_backward():
            self._start_step()
        was_training_forward = self._is_training_forward
        self._is_training_forward = is_new_step
        enter_scope(self)
        try:
            yield
        finally:
            leave_scope(self)
            self._is_training_forward = was_training_forward

    def start_microbatch(self, index: int) -> None:
        """Say which micro-batch of a step runs from now on, where a step has several (pipeline parallelism)."""
        self.microbatch = index
        self.sites.start_step()

    def exchange(self, exchange: Exchange, stock: Callable[[], Tensor]) -> Tensor:
        """Run `exchange` compressed, or `stock` where that is not meant; either way it is counted."""
        site = self.sites.current()
        codec, outcome = self.choose(exchange, site)
        exchange = self.by_measurement(exchange, codec)
        suspended = None if codec is None else self.suspended_outcome(exchange.kind, site)
        self.record(exchange, site, codec if suspended is None else None, suspended or outcome)
        if codec is None:
            return stock()
        exchange = replace(exchange, tensor=_compat.waited(exchange.tensor))
        order = self._channel_order(exchange, site, codec)  # suspended ones too: it is calibrated in the first steps
        if suspended is not None and not self.trial_observers:
            return stock()
        if order is not None:
            exchange = replace(exchange, tensor=order.sort(exchange.tensor))
        if suspended is not None:
            self.observe_suspended(exchange, site, codec)
            return stock()
        self.observe(exchange, site, codec)
        result = exchange.run(codec, self.group, self.seed(exchange.kind, site), self.memory)
        return result if order is None else order.restore(result)

    def suspend(self, owner: str, reasons: Mapping[SiteKey | None, str]) -> None:
        """Say what `owner` wants sent as it is; it replaces all that it wanted before, and ``{}`` resumes everything.

        It holds from the next training step on, for the whole step. What another owner wants is left alone: an
        exchange is compressed when no owner wants it suspended. All ranks say the same before the same step.

        Args:
            owner: who asks, ``"guard"`` or ``"schedule"``; the traffic counters show it with the reason.
            reasons: why, by site (``(module, direction, kind)``); ``None`` is the key of all sites. Compiled exchanges
                have no module names: together they are the site ``""`` of each direction and kind.
        """
        self._suspensions.want(owner, reasons)

    def suspended_outcome(self, kind: Kind, site: Site) -> str | None:
        """Who suspended the exchange in this step and why, ``None`` if nobody did."""
        return self._suspensions.outcome(site.name, site.direction, kind)

    @property
    def are_all_suspended(self) -> bool:
        """Whether nothing is compressed in this step, because somebody suspended all sites."""
        return self._suspensions.are_all_suspended

    def switch(self, config: CompressionConfig, element: Literal["e4m3", "int8"] | None = None) -> None:
        """Compress by other settings from the next training step on. All ranks say the same before the same step.

        When codecs change, the channel orders of ``reshape="calibrated"`` are looked for anew, in the first steps with
        the new ones, since another part of the model may ask for them. Graphs of torch.compile follow, except exchanges
        that the settings at the time of tracing sent as they are: those are the library's own in the graph.

        Args:
            config: the settings; not empty ones, for which there is `suspend`.
            element: what ``element="auto"`` means, agreed between ranks; by default what it meant before.
        """
        self._next_settings = (config, element or self.element)

    def seed(self, kind: Kind, site: Site) -> int:
        """Seed of stochastic rounding: another for each step, the same when a forward is computed again in it."""
        microbatch = f"/{self.microbatch}" if self.microbatch else ""
        place = zlib.crc32(f"{site.name}/{site.direction}/{kind}{microbatch}".encode())
        return (place << 30) | (self.step % (1 << 30))

    def observe(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Show a compressed exchange to the observers, unless it repeats one that they have seen."""
        if not site.is_recompute:
            for observer in self.observers:
                observer(exchange, site, codec)

    def observe_suspended(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Show a suspended exchange to the trial observers, unless it repeats one that they have seen."""
        if not site.is_recompute:
            for observer in self.trial_observers:
                observer(exchange, site, codec)

    def choose(self, exchange: Exchange, site: Site) -> tuple[CodecConfig | None, str]:
        """The codec for `exchange`, or ``None`` and the reason. A function of shapes, dtypes and settings only.

        Suspensions are not looked at: what is traced into a graph outlives them.
        """
        tensor = exchange.tensor
        if tensor.dtype not in VALUE_DTYPES:
            return None, f"dtype {str(tensor.dtype).removeprefix('torch.')}"
        if exchange.kind in REDUCING_KINDS and exchange.op not in ("sum", "avg"):
            return None, f"reduction {exchange.op}"
        if exchange.is_scalar_like or tensor.dim() < 2 or tensor.shape[-1] == 1:
            return None, "loss, norm or bias (no feature dim)"
        min_bytes, full_bytes = self.config.min_bytes, exchange.full_bytes(self.world_size)
        if min_bytes != "auto" and full_bytes < min_bytes:
            return None, f"smaller than min_bytes={min_bytes}"
        codec = self.codec_of(site.name, site.direction)
        if codec is None:
            return None, f"excluded in {site.direction}"
        if min_bytes == "auto" and self.break_even.segment(exchange.kind, codec, full_bytes) is None:
            return None, self.break_even.refusal(exchange.kind, codec)
        if _BYPASS.reason:
            return None, _BYPASS.reason
        if self._is_parameter(tensor, site):
            return None, PARAMETER_REASON
        return codec, COMPRESSED

    def by_measurement(self, exchange: Exchange, codec: CodecConfig | None) -> Exchange:
        """`exchange`, by the algorithm that was measured to be the fastest for its size, if that is asked for."""
        if codec is None or self.config.min_bytes != "auto":
            return exchange
        segment = self.break_even.segment(exchange.kind, codec, exchange.full_bytes(self.world_size))
        return exchange if segment is None else replace(exchange, algorithm=segment.algorithm, ranks=self.hierarchy)

    def record(self, exchange: Exchange, site: Site, codec: CodecConfig | None, outcome: str) -> None:
        """Count `exchange`."""
        tensor = exchange.tensor
        stock_bytes = stock_sent_bytes(exchange.kind, tensor.numel() * tensor.element_size(), self.world_size)
        num_bytes = stock_bytes
        if codec is not None:
            by = (self.world_size, exchange.algorithm, exchange.ranks, exchange.dim)
            num_bytes = sent_bytes(exchange.kind, tensor, codec, *by)
        self.traffic.record(TrafficKey(site.name, site.direction, exchange.kind, outcome), stock_bytes, num_bytes)

    def nothing_compressed_reason(self) -> str | None:
        """Why nothing has been compressed so far, or ``None`` if something has, or nothing could be (one rank)."""
        if self.world_size == 1 or self.traffic.total(outcome=COMPRESSED).num_messages:
            return None
        counts = self.traffic.stock_reasons()
        reasons = {why: count for why, count in counts.items() if not why.startswith(SUSPENDED_PREFIX)}
        if counts and not reasons:
            return None  # somebody has asked for it
        if not reasons:
            return (
                "DTensor redistributed nothing over the tensor-parallel axis (is the model parallelised with DTensor?)"
            )
        return ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))

    def codec_of(self, site: str, direction: Direction) -> CodecConfig | None:
        """The codec of module `site` in `direction`, its element resolved; ``None`` where nothing is compressed."""
        key = (site, direction)
        if key not in self._codecs:
            codec = self.config.codec_for(site, direction)
            self._codecs[key] = codec.resolved(self.element) if codec is not None else None
        return self._codecs[key]

    def warn_once(self, message: str) -> None:
        """Warn the user, unless this session has said the same before."""
        if message not in self._warnings:
            self._warnings.add(message)
            self._warn(message)

    def state_dict(self) -> dict[str, Any]:
        """What a run that is resumed needs to give the bits of one that was not broken; plain values and CPU tensors.

        The same on all ranks. All ranks call it, since channel orders that are still being calibrated are gathered.
        """
        orders = self.channel_orders
        return {
            "settings": self._opened_with,
            "current_settings": settings_in_words(self.config, self.element),
            "step": self.step,
            "channel_orders": None if orders is None else orders.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has given, between two steps. Warns when it was given under other settings."""
        difference = settings_difference(state["settings"], self._opened_with)
        if difference is not None:
            self._warn(f"The checkpoint was written with other compression than is given, which is used: {difference}.")
        self.step = state["step"]
        orders, current = state["channel_orders"], state.get("current_settings", state["settings"])
        if orders is not None and current != state["settings"]:
            self._saved_orders = (current, orders)  # of settings that a schedule will switch to again
        elif orders is not None and self.channel_orders is not None:
            self.channel_orders.load_state_dict(orders)

    def _start_step(self) -> None:
        self.step += 1
        self.sites.start_step()
        self._suspensions.start_step()
        if self._next_settings is not None:
            self._apply_settings(*self._next_settings)
            self._next_settings = None
        if self.channel_orders is not None:
            self.channel_orders.start_step()

    def _apply_settings(self, config: CompressionConfig, element: Literal["e4m3", "int8"]) -> None:
        before = settings_in_words(self.config, self.element)
        now = settings_in_words(config, element)
        self.config, self.element = config, element
        self._codecs.clear()
        if any(before[name] != now[name] for name in CODEC_SETTINGS):
            self.channel_orders = self._new_channel_orders()
        if self._saved_orders is not None and self._saved_orders[0] == now and self.channel_orders is not None:
            self.channel_orders.load_state_dict(self._saved_orders[1])
            self._saved_orders = None

    def _new_channel_orders(self) -> ChannelOrders | None:
        if not any(codec.reshape == "calibrated" for codec in self.config.codecs):
            return None
        return ChannelOrders(self.codec_of, self.group, self.replicas, self._inform)

    def _channel_order(self, exchange: Exchange, site: Site, codec: CodecConfig) -> ChannelOrder | None:
        if self.channel_orders is None or codec.reshape == "natural":
            return None
        is_training = self._is_training_forward or site.direction == "backward"
        return self.channel_orders.order_for(exchange, site, codec, is_training=is_training)

    def _is_parameter(self, tensor: Tensor, site: Site) -> bool:
        if site.direction == "backward":
            return _compat.is_parameter_gradient_exchange()
        return self.holds_parameter(tensor)

    def holds_parameter(self, local: Tensor) -> bool:
        """Whether `local` is, or is a view of, this rank's part of a parameter of the attached modules."""
        return _compat.storage_pointer(local) in self._parameter_storages


def settings_in_words(config: CompressionConfig, element: Literal["e4m3", "int8"]) -> dict[str, str]:
    """Each of the settings as text, to be compared: codecs with ``element="auto"`` resolved to `element`."""
    codecs = {"forward": config.forward, "backward": config.backward}
    words = {name: "as it is" if codec is None else str(codec.resolved(element)) for name, codec in codecs.items()}
    others = ("min_bytes", "exclude", "recipes", "during_validation")
    return words | {name: str(getattr(config, name)) for name in others}


def settings_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Where two `settings_in_words` differ, with both; ``None`` where they do not."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names) or None


def _storage(parameter: Tensor) -> int:
    return _compat.storage_pointer(parameter._local_tensor if isinstance(parameter, DTensor) else parameter)


class _Bypass(threading.local):
    reason: str | None = None


_BYPASS = _Bypass()


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
