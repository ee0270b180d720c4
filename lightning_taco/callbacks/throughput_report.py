"""`ThroughputReport`: where the time of a step goes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from typing_extensions import override

from lightning_taco.callbacks.host import Host, host_of
from lightning_taco.callbacks.hosted import HostedCallback
from lightning_taco.callbacks.sampling import checked_every_n_steps
from lightning_taco.collectives.timing import StepTime, StepTimer


class ThroughputReport(HostedCallback):
    """Logs how the time of a step is split into compute, codec and exposed communication.

    Tags, in milliseconds, means over the ranks of the tensor-parallel group; the last three add up to the first:

    ========================================  ==========================================================================
    ``throughput/step_ms``                    from the start of the batch to the end of its optimizer step
    ``throughput/codec_ms``                   encoding, decoding and adding messages
    ``throughput/exposed_communication_ms``   moving messages, waiting for slower ranks included
    ``throughput/compute_ms``                 the rest: model, optimizer, exchanges that go as they are, the host
    ========================================  ==========================================================================

    On CPU the host's clock is read around each part; on CUDA events are recorded on the current stream, and read at the
    end of a measured step only. What the monitors of this package do in the step is left out.

    Limits: the exchange is synchronous today, so all of its communication is exposed. Only compressed exchanges are
    seen; loading the batch is not. A step of several batches under ``accumulate_grad_batches`` is measured by one of
    them. Times of CUDA hold the gaps in which the device waits for the host.

    A Fabric script calls `attach` once after ``fabric.setup_module``, `start_step` before each forward, `end_step`
    after each optimizer step.

    Args:
        every_n_steps: measure and log every how many steps. They are those in the middle between the steps that
            `CompressionMonitor` measures, from step ``every_n_steps // 2`` on, so that neither its cost nor warming up
            is in the times.

    Raises:
        TypeError: at set-up, when the strategy is not `TacoTPStrategy`.
        ValueError: for `every_n_steps` below 1.

    Cost, of a step that is measured: two events for each part of an exchange, one all-reduce of four numbers, and a
    wait for the device. Of other steps: nothing.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = checked_every_n_steps(every_n_steps)
        self._host: Host | None = None
        self._timer: StepTimer | None = None

    def attach(self, loop: pl.Trainer | Fabric) -> None:
        """Measure the steps of `loop`, whose strategy has set the model up.

        Raises:
            TypeError: when the strategy is not `TacoTPStrategy`.
        """
        self._cancel()
        self._host = host_of(loop, type(self).__name__)

    def start_step(self, step: int) -> None:
        """Start the clock, if this step is measured."""
        self._cancel()
        if self._host is not None and step % self.every_n_steps == self.every_n_steps // 2:
            self._timer = StepTimer(self._host.strategy.root_device)
            self._timer.start()

    def end_step(self, step: int, loss: Any = None) -> None:
        """Log the times of a step that was measured; the same on all ranks of a tensor-parallel group."""
        timer, self._timer = self._timer, None
        if timer is not None and self._host is not None:
            self._host.log(_mean_over_ranks(timer.stop(), self._host), step)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave no clock running."""
        self._cancel()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave no clock running."""
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _mean_over_ranks(time: StepTime, host: Host) -> dict[str, float]:
    parts = [time.step, time.compute, time.codec, time.communication]
    times = torch.tensor(parts, dtype=torch.float64).to(host.strategy.root_device)
    group = host.compression.group
    if group is not None:
        dist.all_reduce(times, group=group)
        times /= group.size()
    step, compute, codec, communication = (1e3 * times).tolist()
    return {
        "throughput/step_ms": step,
        "throughput/compute_ms": compute,
        "throughput/codec_ms": codec,
        "throughput/exposed_communication_ms": communication,
    }
