"""What the Trainer's and Fabric's strategy share: the life of their compression sessions, from settings to table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_taco import _compat, dtensor
from lightning_taco.codec.elements import FP8_ELEMENTS
from lightning_taco.collectives.agreement import agree_on_element
from lightning_taco.collectives.break_even_file import Measured
from lightning_taco.collectives.calibration import RankGroup
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.traffic import TrafficCounters
from lightning_taco.config import CompressionConfig
from lightning_taco.dtensor.errors import ErrorKey, ReconstructionErrors, SiteError
from lightning_taco.dtensor.session import COMPRESSED, CompressionSession
from lightning_taco.strategies import break_even, checks, rank_agreement, report

TENSOR_PARALLEL = "tensor_parallel"
DATA_PARALLEL = "data_parallel"


class Compression:
    """Everything that one strategy switches on, and off again.

    Args:
        config: the settings, or ``None`` for off: then every method is a no-op and nothing is patched.
        sample_every_n_steps: every how many steps the reconstruction error is measured; 0 for never.

    Attributes:
        session: the compression of the tensor-parallel group while it runs.
        traffic: what this rank sent; stays readable after `stop`.
        errors: the reconstruction errors read last, by site; the same on all ranks.
        num_samples: how often they have been read.
        group: the ranks of the tensor-parallel axis, once a module is set up.
        device: where the exchanges of this rank run, once a module is set up.
        measured: what ``min_bytes="auto"`` goes by; ``None`` when nothing had to be measured.
    """

    def __init__(self, config: CompressionConfig | None, sample_every_n_steps: int) -> None:
        self.config = config
        self.sample_every_n_steps = sample_every_n_steps
        self.session: CompressionSession | None = None
        self.traffic = TrafficCounters()
        self.errors: dict[ErrorKey, SiteError] = {}
        self.num_samples = 0
        self.group: dist.ProcessGroup | None = None
        self.device: torch.device | None = None
        self.measured: Measured | None = None
        self._hierarchy: Hierarchy | None = None
        self._mesh: DeviceMesh | None = None
        self._element: Literal["e4m3", "int8"] | None = None
        self._handles: list[RemovableHandle] = []
        self._plan_problem: str | None = None
        self._sampler = ReconstructionErrors()
        self._num_steps = 0
        self._is_first_step_reported = False
        self._last_trained: CompressionSession | None = None

    @property
    def is_on(self) -> bool:
        """Whether anything is compressed now."""
        return self.session is not None

    def start(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        """Check `module`, and compress what it redistributes over its tensor-parallel group from now on.

        A strategy that sets up several modules calls it for each.

        Raises:
            ValueError: for a split of `module` that would give wrong shapes.
            RuntimeError: under a torch whose redistribution is not known.
        """
        tensor_parallel_mesh = mesh[TENSOR_PARALLEL]
        checks.check_even_shards(module, tensor_parallel_mesh)
        self._handles += checks.add_sequence_length_checks(module, tensor_parallel_mesh)
        self._plan_problem = checks.check_parallelized(module, tensor_parallel_mesh)
        if self.session is None:
            self._open_session(tensor_parallel_group(module, mesh), mesh, device)
        if self.session is not None:
            self.session.attach(module)

    def stop(self) -> None:
        """Remove every hook and patched name; counters stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.session is not None:
            self.session.detach()
            if self.session.memory is not None:
                self.session.memory.close()
                self.session.memory = None
            if self.session.step:
                self._last_trained = self.session
            self.session = None
            dtensor.remove()
        if self._hierarchy is not None:
            self._hierarchy.destroy()
            self._hierarchy = None

    def switch(self, config: CompressionConfig) -> None:
        """Compress by other settings from the next training step on, and say so in the lines of the start.

        All ranks call it, before the same step; nothing happens when compression is off. See
        `CompressionSession.switch`.

        Raises:
            ValueError: for settings that compress nothing; ``session.suspend`` is for that.
        """
        if self.session is None:
            return
        if config.is_empty:
            raise ValueError(
                f"{config} compresses nothing, so there is nothing to switch to; suspend compression instead, or give "
                "a forward or backward codec."
            )
        assert self._mesh is not None
        element = self._element_for(config)
        for line in report.start_lines(config, element, self._mesh)[1:]:  # without the mesh
            rank_zero_info(line)
        self._map_memory(config)
        self._measure_break_even(config, element)
        self.session.switch(config, element)

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the compression; ``None`` when it is off. All ranks call it.

        After `stop` it is the state of the run that has ended, for a Trainer that saves after ``fit``.
        """
        session = self.session or self._last_trained
        return None if session is None else session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's `state_dict`; warns when it was written under other settings."""
        if self.session is not None:
            self.session.load_state_dict(state)
        elif self.config is None or self.config.is_empty:
            settings = ", ".join(f"{name}: {value}" for name, value in state["settings"].items())
            rank_zero_warn(f"The checkpoint was written with compression ({settings}), but compression is off now.")

    def check_first_batch(self, batch: Any, module: nn.Module | None) -> None:
        """Refuse different batches within a tensor-parallel group, and say when dropout masks would differ.

        Raises:
            ValueError: on every rank, naming the ranks whose batches differ.
        """
        if self.group is None or self.group.size() == 1:
            return
        rank_agreement.check_same_batch(batch, self.group)
        if module is not None and any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules()):
            try:
                rank_agreement.check_rng_agrees(self.group, self.device)
            except ValueError as error:
                rank_zero_warn(str(error))

    def _open_session(self, group: dist.ProcessGroup, mesh: DeviceMesh, device: torch.device) -> None:
        self.group, self.device, self._mesh, self._element = group, device, mesh, None
        element = "e4m3" if self.config is None else self._element_for(self.config)
        for line in report.start_lines(self.config, element, mesh):
            rank_zero_info(line)
        if self.config is None or self.config.is_empty:
            return
        if element == "int8" and group.size() > 1:
            rank_zero_warn(
                "element='auto' means INT8 here, since a device of this tensor-parallel group has no FP8 "
                "(compute capability below 8.9)."
            )
        if not _compat.supports_fp8(device) and any(codec.element in FP8_ELEMENTS for codec in self.config.codecs):
            rank_zero_warn(
                f"{device} has no FP8: its codes are made by integer arithmetic, with the same bits but slower. "
                "element='int8' takes the same bytes and is faster and closer there."
            )
        dtensor.install()
        self.session = CompressionSession(
            self.config, group, element, replicas=_replicas(mesh), inform=rank_zero_info, warn=rank_zero_warn
        )
        self.traffic = self.session.traffic
        self._is_first_step_reported = False
        self._map_memory(self.config)
        self._measure_break_even(self.config, element)

    def _map_memory(self, config: CompressionConfig) -> None:
        """For ``transport="auto"``: let the GPUs read each other's memory, or say why they cannot."""
        session = self.session
        if config.transport != "auto" or session is None or session.memory is not None or session.world_size == 1:
            return
        assert self.device is not None
        session.memory, reason = PeerMemory.open(session.group, self.device)
        how = f"process group, since {reason}" if reason else "mapped memory: GPUs read each other's messages in place"
        rank_zero_info(f"lightning_taco: transport='auto': {how}")

    def _measure_break_even(self, config: CompressionConfig, element: Literal["e4m3", "int8"]) -> None:
        """For ``min_bytes="auto"``, and codecs that were not measured yet: find out what pays, and say so."""
        if not config.measures_break_even or self.session is None or self.session.world_size == 1:
            return
        assert self.device is not None
        if self._hierarchy is None:
            self._hierarchy = self.session.hierarchy = Hierarchy.of(self.session.group)
        session = self.session
        ranks = RankGroup(session.group, self.device, session.replicas, self._hierarchy, session.memory)
        self.measured, lines = break_even.decide(config, element, ranks, self.measured)
        self.session.break_even = self.measured.break_even
        for line in lines:
            rank_zero_info(line)

    def _element_for(self, config: CompressionConfig) -> Literal["e4m3", "int8"]:
        """What ``element="auto"`` means on the ranks of the group: agreed once, when settings first ask for it."""
        if self._element is None and config.uses_auto_element:
            assert self.group is not None
            assert self.device is not None
            self._element = agree_on_element(self.group, self.device)
        return self._element or "e4m3"

    def forward_scope(self, *, is_training: bool) -> AbstractContextManager[None]:
        """Around a step's forward."""
        if self.session is None or not (is_training or self.session.config.during_validation):
            return nullcontext()
        return self._training_forward() if is_training else self.session.scope()

    def backward_scope(self) -> AbstractContextManager[None]:
        """Around a step's backward."""
        return nullcontext() if self.session is None else self._training_backward()

    @property
    def compression_ratio(self) -> float:
        """Bytes that would have been sent over bytes sent, so far."""
        return self.traffic.total().ratio

    @property
    def relative_l2_error(self) -> float | None:
        """Largest relative error of any site at the last sample; ``None`` before the first."""
        return max((error.relative_l2_error for error in self.errors.values()), default=None)

    @rank_zero_only
    def print_end_table(self) -> None:
        """Print what was sent and what it cost, on rank 0; nothing if nothing was exchanged."""
        if self.traffic.counts:
            report.print_end_table(self.traffic, self.errors)

    @contextmanager
    def _training_forward(self) -> Iterator[None]:
        session = self.session
        assert session is not None
        is_sample = self.sample_every_n_steps > 0 and self._num_steps % self.sample_every_n_steps == 0
        self._num_steps += 1
        if is_sample and self._sampler not in session.observers:
            self._sampler.clear()
            session.observers.append(self._sampler)
        with session.scope(is_new_step=True):
            yield

    @contextmanager
    def _training_backward(self) -> Iterator[None]:
        session = self.session
        assert session is not None
        with session.scope():
            yield
        if self._sampler in session.observers:
            session.observers.remove(self._sampler)
            self.errors = self._sampler.read(session.group)
            self.num_samples += 1
        if not self._is_first_step_reported and not session.are_all_suspended:
            self._is_first_step_reported = True
            self._report_first_step(session)

    def _report_first_step(self, session: CompressionSession) -> None:
        reason = session.nothing_compressed_reason()
        if reason is not None:
            # A plan that splits nothing is the cause behind having nothing to exchange.
            cause = reason if session.traffic.counts else self._plan_problem or reason
            rank_zero_warn(f"lightning_taco compressed nothing in the first step: {cause}.")
            return
        compressed = session.traffic.total(outcome=COMPRESSED)
        rank_zero_info(
            f"lightning_taco: first step: {compressed.num_messages} of {session.traffic.total().num_messages} "
            f"exchanges compressed, {report.format_bytes(compressed.stock_bytes)} sent as "
            f"{report.format_bytes(compressed.sent_bytes)} ({compressed.ratio:.2f}x)"
        )


def _replicas(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks at this rank's place of each replica of the model; ``None`` for one replica."""
    if DATA_PARALLEL not in (mesh.mesh_dim_names or ()) or mesh[DATA_PARALLEL].size() == 1:
        return None
    return mesh[DATA_PARALLEL].get_group()


def tensor_parallel_group(module: nn.Module, mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group over which `module` exchanges intermediate tensors.

    It is read off the module's own DTensors: a model that is fitted a second time keeps the mesh that parallelised it,
    whose groups are not those of the new strategy's mesh.
    """
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            if TENSOR_PARALLEL in names:
                return parameter.device_mesh.get_group(TENSOR_PARALLEL)
    return mesh[TENSOR_PARALLEL].get_group()
