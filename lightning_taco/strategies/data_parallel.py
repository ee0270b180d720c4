"""What the Trainer's and Fabric's strategy share of data parallelism: its life, from settings to table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_taco.data_parallel import DataParallelConfig, DataParallelSession
from lightning_taco.data_parallel.fsdp_units import fsdp_parameters
from lightning_taco.data_parallel.nodes import regular_node_size
from lightning_taco.data_parallel.quan_grad import QuantizedGradients
from lightning_taco.data_parallel.replicated import ReplicatedGradients, broadcast_from_first
from lightning_taco.data_parallel.seeds import derived_seed
from lightning_taco.data_parallel.traffic import COMPRESSED, DataParallelTraffic
from lightning_taco.strategies import report

DATA_PARALLEL = "data_parallel"


class DataParallel:
    """Everything that one strategy does between data-parallel ranks, beyond what FSDP2 does by itself.

    Parameters that FSDP2 shards are exchanged by FSDP2, through our exchanges. All others, the whole model where FSDP2
    is not used, get the values of the first data-parallel rank at the start, and their gradients are averaged.

    Args:
        config: the settings, or ``None`` for off: then every method is a no-op, and data parallelism is FSDP2's alone.

    Attributes:
        session: what runs; ``None`` before `start` and after `stop`, and where there is nothing to do.
        traffic: what this rank sent; stays readable after `stop`.
    """

    def __init__(self, config: DataParallelConfig | None) -> None:
        self.config = config
        self.session: DataParallelSession | None = None
        self.traffic = DataParallelTraffic()
        self._replicated: list[ReplicatedGradients] = []
        self._quantized: list[QuantizedGradients] = []
        self._modules: list[nn.Module] = []
        self._is_first_step_reported = False
        self._last_state: dict[str, Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is done now."""
        return self.session is not None

    def start(self, module: nn.Module, mesh: DeviceMesh, processes_per_node: int) -> None:
        """Exchange what `module` has between its data-parallel ranks from now on. All ranks call it.

        A strategy that sets up several modules calls it for each.
        """
        if self.config is None:
            return
        group = mesh[DATA_PARALLEL].get_group()
        if group.size() == 1 and self.config.accumulation is None:
            rank_zero_info("lightning_taco: data_parallel_size is 1, so nothing travels between data-parallel ranks")
            return
        if self.session is None:
            self.session = DataParallelSession(self.config, inform=rank_zero_info, warn=rank_zero_warn)
            self.traffic = self.session.traffic
            self._is_first_step_reported = False
        self._modules.append(module)
        node_size = regular_node_size(dist.get_process_group_ranks(group), processes_per_node)
        self.session.attach_fsdp(module, node_size=node_size)
        self._quantize(module, group)
        self._replicate(module, group, node_size)

    def attach_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Let `optimizers` take quantised gradients, where gradients are."""
        for optimizer in optimizers:
            if self._quantized:
                self._quantized[0].attach(optimizer)

    def stop(self) -> None:
        """Remove every hook; counters stay readable."""
        if self.session is None:
            return
        self._last_state = self.session.state_dict()
        for replicated in self._replicated:
            replicated.detach()
        for quantized in self._quantized:
            quantized.detach()
        self._replicated.clear()
        self._quantized.clear()
        self._modules.clear()
        self.session.detach()
        self.session = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the backwards within.

        FSDP2 is told so too, unless gradients are quantised: then it reduces each micro-batch, so that this rank
        accumulates its own shard only, in 8 bits, where it would keep whole gradients of all parameters.
        """
        if self.session is None:
            yield
            return
        modules = [child for module in self._modules for child in module.modules() if isinstance(child, FSDPModule)]
        modules = [] if self._quantized else modules
        with ExitStack() as stack:
            for replicated in self._replicated:
                stack.enter_context(replicated.no_sync())
            for child in modules:
                child.set_requires_gradient_sync(False, recurse=False)
                stack.callback(child.set_requires_gradient_sync, True, recurse=False)
            yield

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around the backwards of all micro-batches of a pipeline; `finish_backward` averages what they add up to.

        FSDP2 is left alone: torch's pipelining tells it when to reduce.
        """
        with ExitStack() as stack:
            for replicated in self._replicated:
                stack.enter_context(replicated.no_sync())
            yield

    def finish_backward(self) -> None:
        """Average what backward has left; all ranks call it after each."""
        if self.session is None:
            return
        for replicated in self._replicated:
            replicated.finish()
        if not self._is_first_step_reported and self.traffic.counts:
            self._is_first_step_reported = True
            self._report_first_step(self.session)

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; ``None`` when it is off. All ranks call it."""
        return self._last_state if self.session is None else self.session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, with or without a `state_dict`, after its weights were loaded."""
        if self.session is not None:
            self.session.load_state_dict(state or {"num_calls": {}})

    @rank_zero_only
    def print_end_table(self) -> None:
        """Print what was sent, on rank 0; nothing if nothing was exchanged."""
        if self.traffic.counts:
            report.print_data_parallel_table(self.traffic)

    def _quantize(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        assert self.config is not None
        assert self.session is not None
        if self.config.accumulation is None:
            return
        seed = derived_seed(self.config.seed, group.rank(), len(self._quantized))
        quantized = QuantizedGradients(module.parameters(), self.config.accumulation, seed)
        self._quantized.append(quantized)
        self.session.count(f"quantised gradients {len(self._quantized)}", quantized)
        rank_zero_info(
            f"lightning_taco: gradients are kept in {self.config.accumulation}, "
            f"{report.format_bytes(quantized.message_bytes)} on this rank"
        )

    def _replicate(self, module: nn.Module, group: dist.ProcessGroup, node_size: int) -> None:
        assert self.config is not None
        assert self.session is not None
        sharded = fsdp_parameters(module)
        whole = [parameter for parameter in module.parameters() if id(parameter) not in sharded]
        if group.size() == 1 or not whole:
            return
        broadcast_from_first([*whole, *module.buffers()], group)
        if any(parameter.requires_grad for parameter in whole):
            replicated = ReplicatedGradients(whole, self.session.exchange(group, node_size), self.config)
            self._replicated.append(replicated)
            self.session.count(f"replicated gradients {len(self._replicated)}", replicated)

    def _report_first_step(self, session: DataParallelSession) -> None:
        reason = session.nothing_compressed_reason()
        if reason is not None:
            rank_zero_warn(
                f"lightning_taco compressed nothing between data-parallel ranks in the first step: {reason}."
            )
            return
        sent = session.traffic.total(outcome=COMPRESSED)
        copies = f"; copies of weights take {report.format_bytes(session.copy_bytes)}" if session.copy_bytes else ""
        rank_zero_info(
            f"lightning_taco: first step: {report.format_bytes(sent.stock_bytes)} of gradients and weights sent as "
            f"{report.format_bytes(sent.sent_bytes)} ({sent.ratio:.2f}x) between data-parallel ranks{copies}"
        )


def devices_per_node(devices: list[torch.device] | None) -> int:
    """Processes of this run on one node."""
    return len(devices) if devices else 1
