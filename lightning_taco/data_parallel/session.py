"""One model's compressed data parallelism: what is installed where, what it has sent, what a checkpoint keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_taco import _compat
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.fsdp import CompressedReduceScatter, CompressedReplicaSum
from lightning_taco.data_parallel.fsdp_units import FsdpUnit, fsdp_units
from lightning_taco.data_parallel.hsdp import ReplicaGroup
from lightning_taco.data_parallel.nodes import make_node_groups, regular_node_size
from lightning_taco.data_parallel.settings import DataParallelConfig, resolve_data_parallel
from lightning_taco.data_parallel.traffic import COMPRESSED, DataParallelTraffic
from lightning_taco.data_parallel.weights import WeightDifferenceGather

logger = logging.getLogger(__name__)


class DataParallelSession:
    """What `compress_fsdp` and the strategies hold on to.

    Args:
        config: the settings.
        inform: called on every rank with a line for the user.
        warn: the same, for what the user should look into.

    Attributes:
        traffic: what this rank sent; stays readable after `detach`.
        gathers: the weight exchanges by unit.
    """

    def __init__(
        self,
        config: DataParallelConfig,
        *,
        inform: Callable[[str], None] = logger.info,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self.config = config
        self.traffic = DataParallelTraffic()
        self.gathers: dict[str, WeightDifferenceGather] = {}
        self._inform, self._warn = inform, warn
        self._exchanges: dict[tuple[int, ...], GradientExchange] = {}
        self._counted: dict[str, Any] = {}  # what has a number of calls, by a name for checkpoints
        self._undo: list[Callable[[], None]] = []

    def exchange(self, group: dist.ProcessGroup, node_size: int | None = None) -> GradientExchange:
        """The exchange of gradients over `group`. Every rank of the default group asks for it at the same time."""
        return self._exchange_over(group, self.config.node_size or node_size)

    def _exchange_over(self, group: dist.ProcessGroup, node_size: int | None) -> GradientExchange:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._exchanges:
            config = self.config
            split = config.gradients_inside_node is not None and config.gradients_between_nodes is not None
            groups = make_node_groups(group, node_size, split=split)
            self._exchanges[ranks] = GradientExchange(
                groups,
                config.gradients_inside_node,
                config.gradients_between_nodes,
                self.traffic,
                config.num_slices,
            )
            if config.compresses_gradients:
                self._inform(f"lightning_taco: {exchange_in_words(self._exchanges[ranks])}")
        return self._exchanges[ranks]

    def attach_fsdp(
        self, module: nn.Module, *, replicas: dist.ProcessGroup | None = None, node_size: int | None = None
    ) -> int:
        """Compress what FSDP2 exchanges for `module`; all ranks together.

        Args:
            module: to which, or to parts of which, FSDP2 was applied. Where its mesh has an axis of replicas (HSDP),
                what it all-reduces between them is compressed too.
            replicas: for HSDP by hand: the ranks that hold the same shards, over which gradients are averaged after
                FSDP2 has reduced them over the mesh that it was given, that of one replica.
            node_size: as in `DataParallelConfig`, where that leaves it open.

        Returns:
            The number of units that FSDP2 exchanges one by one.

        Raises:
            ValueError: for `replicas` beside a mesh that has them.
        """
        units = fsdp_units(module)
        if replicas is not None and any(unit.replicas is not None for unit in units):
            raise ValueError(
                "replicas were given, but the mesh that FSDP2 was given has an axis of replicas too, so gradients "
                "would be reduced over them twice; leave replicas out."
            )
        for unit in units:
            self._attach_unit(unit, replicas, node_size)
        return len(units)

    def count(self, name: str, counted: Any) -> None:
        """Keep the ``num_calls`` of `counted`, which seeds depend on, in checkpoints."""
        self._counted[name] = counted

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the session ends."""
        self._undo.append(undo)

    def refresh_weights(self) -> None:
        """Gather all weights exactly the next time; after they were set from outside. All ranks call it alike."""
        for gather in self.gathers.values():
            gather.refresh()

    def detach(self) -> None:
        """Give every module the exchange that it had."""
        while self._undo:
            self._undo.pop()()
        self._counted.clear()
        self.gathers.clear()

    @property
    def copy_bytes(self) -> int:
        """Memory of all copies of weights on this rank."""
        return sum(gather.copy_bytes for gather in self.gathers.values())

    def nothing_compressed_reason(self) -> str | None:
        """Why nothing has been compressed so far, ``None`` if something has."""
        if self.traffic.total(outcome=COMPRESSED).num_messages:
            return None
        reasons = self.traffic.stock_reasons()
        if not reasons:
            return "nothing was exchanged between data-parallel ranks"
        return ", ".join(f"{count} x {why}" for why, count in sorted(reasons.items(), key=lambda item: -item[1]))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to give the bits of this one, which from here on it shares: plain integers.

        All ranks call it. Weights are gathered exactly the next time, here as in a run that is resumed.
        """
        self.refresh_weights()
        return {"num_calls": {name: counted.num_calls for name, counted in self._counted.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has given, after weights were loaded."""
        for name, num_calls in state["num_calls"].items():
            if name in self._counted:
                self._counted[name].num_calls = num_calls
        self.refresh_weights()

    def _attach_unit(self, unit: FsdpUnit, replicas: dist.ProcessGroup | None, node_size: int | None) -> None:
        (group,) = _compat.fsdp_param_groups(unit.module)
        before = (group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook)
        divide_factor = group.gradient_divide_factor
        fsdp = unit.fsdp

        def restore() -> None:
            fsdp.set_custom_reduce_scatter(before[0])
            fsdp.set_custom_all_gather(before[1])
            fsdp.set_all_reduce_hook(before[2])
            group.gradient_divide_factor = divide_factor

        if self.config.compresses_gradients and unit.group.size() > 1:
            reduce_scatter = CompressedReduceScatter(unit, self.exchange(unit.group, node_size), self.config)
            fsdp.set_custom_reduce_scatter(reduce_scatter)
            self.count(f"gradients of {unit.name}", reduce_scatter)
        if self.config.compresses_gradients and replicas is not None:
            average = CompressedReplicaSum(unit, self._replica_exchange(unit, replicas, node_size), self.config)
            fsdp.set_all_reduce_hook(average)
            self.count(f"replicas of {unit.name}", average)
        if self.config.compresses_gradients and unit.replicas is not None and unit.replicas.size() > 1:
            exchange = self._replica_exchange(unit, unit.replicas, node_size)
            reduction = CompressedReplicaSum(unit, exchange, self.config)
            self.on_detach(_compat.replace_replica_group(group, ReplicaGroup(unit.replicas, reduction, exchange)))
            self.count(f"replicas of {unit.name}", reduction)
        if self.config.weights is not None and unit.group.size() > 1:
            gather = WeightDifferenceGather(unit, self.config, self.traffic, self._warn)
            fsdp.set_custom_all_gather(gather)
            self.on_detach(_compat.register_first(unit.module, gather.before_forward).remove)
            self.gathers[unit.name] = gather
            self.count(f"weights of {unit.name}", gather)
        self.on_detach(restore)

    def _replica_exchange(self, unit: FsdpUnit, replicas: dist.ProcessGroup, node_size: int | None) -> GradientExchange:
        """The exchange between `replicas`, each of which has as many consecutive data-parallel ranks as `unit`."""
        node_size = self.config.node_size or node_size
        if node_size is not None:
            places = [replica * unit.group.size() + unit.group.rank() for replica in range(replicas.size())]
            node_size = regular_node_size(places, node_size)
        return self._exchange_over(replicas, node_size)


def compress_fsdp(
    module: nn.Module,
    config: DataParallelConfig | Mapping[str, Any] | str = "sdp4bit",
    *,
    replicas: dist.ProcessGroup | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> DataParallelSession:
    """Compress the gradients, and the weights if asked to, that FSDP2 exchanges for `module`.

    Every rank calls it once, after ``fully_shard`` and before the first forward.

    Args:
        module: to which, or to parts of which, ``fully_shard`` was applied.
        config: a recipe name (``"sdp4bit"``, ``"tlq_hs"``) or the settings.
        replicas: for HSDP by hand, see `DataParallelSession.attach_fsdp`; not with FSDP2's own mesh of replicas.
        warn: called with what the user should look into.

    Returns:
        The session, which counts, goes into checkpoints, and ends with ``detach()``.

    Raises:
        ValueError: for unknown settings, or a module that FSDP2 does not shard.

    Example::

        fully_shard(model, mesh=mesh)
        session = compress_fsdp(model)
    """
    settings = required_settings(config)
    session = DataParallelSession(settings, warn=warn)
    if not session.attach_fsdp(module, replicas=replicas):
        raise ValueError(
            f"FSDP2 shards nothing of {type(module).__name__}, so there is no exchange to compress; apply fully_shard "
            "first, or use compress_ddp for a DistributedDataParallel."
        )
    return session


def required_settings(config: DataParallelConfig | Mapping[str, Any] | str) -> DataParallelConfig:
    """The settings of a function that is called in order to compress.

    Raises:
        ValueError: for settings that compress nothing.
    """
    settings = resolve_data_parallel(config)
    if settings is None or not (settings.compresses_gradients or settings.weights is not None):
        raise ValueError(f"{config!r} compresses no exchange; use 'sdp4bit' or 'tlq_hs', or leave the call out.")
    return settings


def exchange_in_words(exchange: GradientExchange) -> str:
    """Levels and codecs of `exchange`, for the user."""
    groups = exchange.groups
    ranks = f"gradients over {groups.world_size} data-parallel ranks"
    if not exchange.has_two_levels:
        where = "of one node" if groups.num_nodes == 1 else f"on {groups.num_nodes} nodes"
        return f"{ranks} {where}: {exchange.first_codec}, {exchange.first_codec.bits_per_value:g} bits a value"
    inside, between = exchange.first_codec, exchange.last_codec
    return (
        f"{ranks}, {groups.node_size} on each of {groups.num_nodes} nodes: inside {inside}, "
        f"{inside.bits_per_value:g} bits a value; between {between}, {between.bits_per_value:g} bits a value"
    )
