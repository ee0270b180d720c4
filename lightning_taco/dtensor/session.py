"""One strategy's compression: what it compresses, for which group, when, and what it has sent."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_taco import _compat
from lightning_taco.collectives.algorithms import sent_bytes
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
from lightning_taco.dtensor import scopes
from lightning_taco.dtensor.beside import BesideCompute
from lightning_taco.dtensor.channel_order import ChannelOrder, ChannelOrders
from lightning_taco.dtensor.exchange import Exchange, Observer
from lightning_taco.dtensor.kept_orders import KeptOrders
from lightning_taco.dtensor.outcomes import COMPRESSED, PARAMETER_REASON, nothing_compressed_reason
from lightning_taco.dtensor.settings_words import settings_difference, settings_in_words
from lightning_taco.dtensor.sites import ModuleSites, Site
from lightning_taco.dtensor.suspensions import SiteKey, Suspensions

logger = logging.getLogger(__name__)


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
        beside: where exchanges run that are not waited for.
        memory: what the group's GPUs have mapped of each other; ``None`` to go over the process group.
        step: training steps begun; part of the seed of stochastic rounding.
        microbatch: of the step, which runs now; another part of it.
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
        self.beside = BesideCompute()
        self.step = 0
        self.microbatch = 0
        self._inform = inform
        self._orders = KeptOrders(self._new_channel_orders)
        self._suspensions = Suspensions()
        self._next_settings: tuple[CompressionConfig, Literal["e4m3", "int8"]] | None = None
        self._opened_with = settings_in_words(config, element)
        self._warn = warn
        self._warnings: set[str] = set()
        self._is_training_forward = False
        self._codecs: dict[tuple[str, Direction], CodecConfig | None] = {}
        self._parameter_storages: set[int] = set()

    @property
    def world_size(self) -> int:
        """Ranks of the tensor-parallel group."""
        return self.group.size()

    @property
    def channel_orders(self) -> ChannelOrders | None:
        """The orders of codecs with ``reshape="calibrated"``; ``None`` when there is no such codec."""
        return self._orders.current

    def attach(self, module: nn.Module) -> None:
        """Follow `module` too: its exchanges know their site, and its parameters are known."""
        self.sites.attach(module)
        scopes.attach(self)
        self._parameter_storages |= {_storage(parameter) for parameter in module.parameters()} - {0}

    def detach(self) -> None:
        """Remove every hook from the module."""
        scopes.detach(self)
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
        scopes.enter_scope(self)
        try:
            yield
        finally:
            scopes.leave_scope(self)
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
        tensor = _compat.waited(exchange.tensor)
        if tensor is not exchange.tensor:
            exchange = replace(exchange, tensor=tensor)
        order = self._channel_order(exchange, site, codec)  # suspended ones too: it is calibrated in the first steps
        if suspended is not None and not self.trial_observers:
            return stock()
        if order is not None:
            exchange = replace(exchange, tensor=order.sort(exchange.tensor))
        if suspended is not None:
            self.observe_suspended(exchange, site, codec)
            return stock()
        self.observe(exchange, site, codec)
        seed = self.seed(exchange.kind, site)

        def run() -> Tensor:
            result = exchange.run(codec, self.group, seed, self.memory)
            return result if order is None else order.restore(result)

        if exchange.is_async:
            return self.beside.start(run, exchange.tensor)
        self.beside.join()
        return run()

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

    def seed(self, kind: Kind, site: Site, part: int = 0) -> int:
        """Seed of stochastic rounding: another for each step, the same when a forward is computed again in it.

        An exchange that goes in parts has one for each.
        """
        microbatch = f"/{self.microbatch}" if self.microbatch else ""
        slice_ = f"/part {part}" if part else ""
        place = zlib.crc32(f"{site.name}/{site.direction}/{kind}{microbatch}{slice_}".encode())
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
        reason = exchange.why_never_compressed()
        if reason is not None:
            return None, reason
        min_bytes, full_bytes = self.config.min_bytes, exchange.full_bytes(self.world_size)
        if min_bytes != "auto" and full_bytes < min_bytes:
            return None, f"smaller than min_bytes={min_bytes}"
        codec = self.codec_of(site.name, site.direction)
        if codec is None:
            return None, f"excluded in {site.direction}"
        if min_bytes == "auto" and self.break_even.segment(exchange.kind, codec, full_bytes) is None:
            return None, self.break_even.refusal(exchange.kind, codec)
        if reason := scopes.bypass_reason():
            return None, reason
        if self._is_parameter(exchange.tensor, site):
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
        return None if self.world_size == 1 else nothing_compressed_reason(self.traffic)

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
        return {
            "settings": self._opened_with,
            "current_settings": settings_in_words(self.config, self.element),
            "step": self.step,
            "channel_orders": self._orders.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has given, between two steps. Warns when it was given under other settings."""
        difference = settings_difference(state["settings"], self._opened_with)
        if difference is not None:
            self._warn(f"The checkpoint was written with other compression than is given, which is used: {difference}.")
        self.step = state["step"]
        if state["channel_orders"] is not None:
            current = state.get("current_settings", state["settings"])
            self._orders.load_state_dict(state["channel_orders"], state["settings"], current)

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
        self.config, self.element = config, element
        self._codecs.clear()
        self._orders.follow(before, settings_in_words(config, element))

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


def _storage(parameter: Tensor) -> int:
    return _compat.storage_pointer(parameter._local_tensor if isinstance(parameter, DTensor) else parameter)
