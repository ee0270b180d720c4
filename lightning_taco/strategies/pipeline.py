"""What a strategy does for pipeline parallelism: its life, from settings to table, and a LightningModule's steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_taco.pipeline_parallel import (
    Agreement,
    Cut,
    PipelineConfig,
    PipelineEngine,
    check_num_microbatches,
    cut,
    host_group,
    make_layout,
    peers_group,
)
from lightning_taco.pipeline_parallel.errors import TransferErrors
from lightning_taco.pipeline_parallel.layers import find_pipelined
from lightning_taco.pipeline_parallel.transfers import COMPRESSED, Counts
from lightning_taco.strategies import rank_agreement, report
from lightning_taco.strategies.activations import Activations
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.pipeline_arguments import PipelineArguments
from lightning_taco.strategies.pipeline_logs import StepLogs

PIPELINE_PARALLEL = "pipeline_parallel"
NOTHING_TRAINED = "_lightning_taco_nothing_trained"


class Pipeline:
    """The pipeline of one strategy. With one stage every method is a no-op.

    Args:
        arguments: as the user gave them.
        sample_every_n_steps: every how many training steps the error of transfers is measured; 0 for never.

    Attributes:
        engine: what runs, between `start` and `stop`.
        counts: what crossed the borders of this rank's stages; stays readable after `stop`.
        errors: the relative errors measured last, by site.
        num_samples: how often they have been measured.
    """

    def __init__(self, arguments: PipelineArguments, sample_every_n_steps: int) -> None:
        self.arguments = arguments
        self.sample_every_n_steps = sample_every_n_steps
        self.layout = make_layout(arguments.schedule, arguments.size, arguments.num_stages)
        if self.is_on:
            check_num_microbatches(arguments.num_microbatches, self.layout)
        self.engine: PipelineEngine | None = None
        self.counts: Counts | None = None
        self.errors: dict[str, float] = {}
        self.num_samples = 0
        self._agreement: Agreement | None = None
        self._module: pl.LightningModule | None = None
        self._logs: StepLogs | None = None
        self._must_check_batch = True
        self._is_first_step_reported = False
        self._zero_gradients: Any = None
        self._last_state: dict[str, Any] | None = None
        self._nothing: nn.Parameter | None = None
        self._warned: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether there is more than one stage."""
        return self.arguments.size > 1

    @property
    def config(self) -> PipelineConfig | None:
        """What is compressed between stages."""
        return self.arguments.config

    @property
    def agreement(self) -> Agreement:
        """Between the ranks of this pipeline, from set-up on."""
        assert self._agreement is not None
        return self._agreement

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The pipeline axis, while there is more than one stage."""
        return self._agreement.group if self._agreement is not None else None

    def join(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Meet the other ranks of this pipeline. All processes of the run call it, once the mesh is there."""
        if not self.is_on:
            return
        if self._agreement is not None:  # of the run before, kept for saving after it
            self._leave(self._agreement)
        axes = {name: place for place, name in enumerate(mesh.mesh_dim_names or ())}
        ranks = mesh.mesh.movedim(axes[PIPELINE_PARALLEL], -1).reshape(-1, self.arguments.size)
        group = mesh[PIPELINE_PARALLEL].get_group()
        host = host_group(group, ranks.tolist())
        peers = peers_group(ranks.T.tolist()) if len(ranks) > 1 else None
        self._agreement = Agreement(group, host, device, peers)

    def cut(self, root: nn.Module) -> Cut | None:
        """Leave in `root` the layers of this rank's stages only."""
        if not self.is_on:
            return None
        return cut(root, self.layout, self.agreement.group.rank(), self.arguments.split)

    def start(
        self, module: pl.LightningModule, mesh: DeviceMesh, compression: Compression, activations: Activations
    ) -> None:
        """Run the steps of `module` through the pipeline from now on.

        Raises:
            ValueError: for what a pipeline cannot run.
        """
        if not self.is_on:
            return
        self._check_runnable(module)
        replica = mesh["data_parallel"].get_local_rank()
        engine = PipelineEngine(module, self.agreement, self.arguments.num_microbatches, self.config, replica)
        is_sharded = any(isinstance(each, FSDPModule) for each in engine.module.modules())
        if is_sharded and self.layout.has_several_stages_a_rank:
            raise ValueError(
                f"pipeline_schedule={self.layout.schedule!r} gives a rank several stages, but FSDP2 gathers one model "
                'on each; use "1F1B" or "GPipe" with FSDP2, or do not shard weights (data_parallel="tlq_hs" averages '
                "gradients without FSDP2)."
            )
        engine.step.forward_scope = lambda index: _scopes(index, compression, activations)
        engine.step.backward_scope = lambda index: _scopes(index, compression, None)
        if is_overridden("backward", module):
            engine.step.backward = module.backward
        self.engine, self.counts, self._module = engine, engine.counts, module
        self._logs = StepLogs(module, mesh)
        self._must_check_batch, self._is_first_step_reported = True, False
        self._zero_gradients = module.optimizer_zero_grad
        # Lightning sets gradients to zero between forward and backward: too late, as both have been by then.
        module.__dict__["optimizer_zero_grad"] = lambda *_, **__: None
        for line in self._start_lines():
            rank_zero_info(line)

    def stop(self) -> None:
        """Undo everything; counters stay readable."""
        if self.engine is not None:
            self._last_state = self._state(self.engine)
            self.engine.close()
            self.engine = None
        if self._module is not None:
            self._module.__dict__.pop("optimizer_zero_grad", None)
            self._module = None

    def train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One ``training_step``, forward and backward, on every rank."""
        engine, module = self._running()
        self._check_first_batch(args)
        trainer = module.trainer
        batch_index = trainer.fit_loop.epoch_loop.batch_idx
        if batch_index % trainer.accumulate_grad_batches == 0:
            self._zero_gradients(trainer.current_epoch, batch_index, trainer.optimizers[0])
        is_sample = self.sample_every_n_steps > 0 and engine.step.number % self.sample_every_n_steps == 0
        engine.counts.errors = TransferErrors() if is_sample else None
        factor = 1 / trainer.accumulate_grad_batches
        result = self._run("training_step", args, kwargs, loss_of=lambda output: _loss_of(output) * factor)
        if engine.counts.errors is not None:
            self.errors, engine.counts.errors = engine.counts.errors.read(), None
            self.num_samples += 1
        self._report_first_step()
        return result

    def evaluate(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One ``validation_step``, ``test_step`` or ``predict_step``; every rank gets what it returned."""
        return self._run(name, args, kwargs)

    @contextmanager
    def something_to_train(self, root: nn.Module) -> Iterator[None]:
        """Lets ``configure_optimizers`` be called on a rank whose stages have nothing to train."""
        if not self.is_on or any(parameter.requires_grad for parameter in root.parameters()):
            yield
            return
        # Optimizers refuse an empty list; of this parameter nothing is left behind.
        self._nothing = nn.Parameter(torch.zeros(0))
        root.register_parameter(NOTHING_TRAINED, self._nothing)
        try:
            yield
        finally:
            delattr(root, NOTHING_TRAINED)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers of other structure on one stage than on another; all ranks call it.

        Raises:
            ValueError: on every rank.
        """
        if not self.is_on:
            return
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter is not self._nothing]
        counts = self.agreement.objects([len(optimizer.param_groups) for optimizer in optimizers])
        if any(count != counts[0] for count in counts):
            raise ValueError(
                f"configure_optimizers gives {' / '.join(map(str, counts))} parameter groups on the ranks of one "
                "pipeline, but learning rate schedulers and checkpoints need the same everywhere; leave groups in the "
                "list that have no parameters on this rank."
            )

    def gathered(self, values: Mapping[str, float]) -> dict[str, float]:
        """`values` of all ranks of the pipeline, whose names differ, on each; all call it."""
        if not self.is_on:
            return dict(values)
        return {name: value for each in self.agreement.objects(dict(values)) for name, value in each.items()}

    def stage_of(self, site: str) -> int:
        """The stage, of those of this rank, that holds the module whose path `site` begins with."""
        engine, _ = self._running()
        return engine.stages.stage_of(site)

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; ``None`` without a pipeline."""
        return self._last_state if self.engine is None else self._state(self.engine)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a `state_dict`."""
        if self.engine is not None and state is not None:
            self.engine.step.number = state["step"]

    @rank_zero_only
    def print_end_table(self) -> None:
        """Print what crossed the borders of rank 0's stages; nothing if nothing did."""
        if self.counts is not None:
            report.print_pipeline_table(self.counts)

    @staticmethod
    def _leave(agreement: Agreement) -> None:
        if agreement.host is not agreement.group:
            dist.destroy_process_group(agreement.host)
        if agreement.peers is not None:
            dist.destroy_process_group(agreement.peers)

    def _run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], loss_of: Any = None) -> Any:
        engine, _ = self._running()
        batch, *rest = args
        logs = self._logs
        assert logs is not None

        def user_step(root: nn.Module, part: Any) -> Any:
            return logs.run(lambda: getattr(root, name)(part, *rest, **kwargs))

        with logs.captured():
            outcome, calls = engine.run(
                batch, user_step, is_training=loss_of is not None, loss_of=loss_of, extra=logs.merged
            )
        self._warn_of_fewer(outcome.num_microbatches)
        logs.replay(calls)
        return outcome.result

    def _running(self) -> tuple[PipelineEngine, pl.LightningModule]:
        assert self.engine is not None
        assert self._module is not None
        return self.engine, self._module

    def _check_runnable(self, module: pl.LightningModule) -> None:
        if not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__}.automatic_optimization is False, but under a pipeline training_step runs on "
                "the rank of the last stage only, for each micro-batch; use automatic optimization."
            )
        inside = {id(parameter) for parameter in find_pipelined(module)[1].parameters()}
        outside = [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in inside]
        if outside:
            raise ValueError(
                f"{', '.join(outside[:3])} would be trained on the ranks of the last stage only, as they lie outside "
                "the model that pipeline_layers() cuts; move them into a layer of it."
            )

    def _check_first_batch(self, args: Sequence[Any]) -> None:
        if self._must_check_batch and args:
            self._must_check_batch = False
            rank_agreement.check_same_batch(args, self.agreement.group, "pipeline")

    def _warn_of_fewer(self, num_microbatches: int) -> None:
        wanted = self.arguments.num_microbatches
        if num_microbatches == wanted:
            return
        text = (
            f"lightning_taco: a batch is not a multiple of num_microbatches={wanted}; it runs as {num_microbatches}, "
            "with a larger bubble. DataLoader(drop_last=True) leaves short batches out."
        )
        if text not in self._warned:
            self._warned.add(text)
            rank_zero_warn(text)

    def _start_lines(self) -> list[str]:
        found = self._running()[0].cut
        parts = ", ".join(f"stage {stage} on pipeline rank {rank}" for stage, rank in enumerate(found.layout.ranks))
        lines = [
            f"lightning_taco: pipeline: {self.layout.schedule}, {self.arguments.num_microbatches} micro-batches; "
            f"{parts}; they begin at layers {', '.join(map(str, found.first_layers))}"
        ]
        if self.config is None:
            return [*lines, "lightning_taco: between stages tensors travel as they are"]
        least = report.format_bytes(self.config.min_bytes)
        for direction in ("forward", "backward"):
            choice = getattr(self.config, direction) or "as it is"
            lines.append(f"lightning_taco: between stages, {direction}: {choice}, tensors of at least {least}")
        return lines

    def _report_first_step(self) -> None:
        if self._is_first_step_reported or self.counts is None:
            return
        self._is_first_step_reported = True
        total, small = self.counts.sent.total(), self.counts.sent.total(outcome=COMPRESSED)
        if self.config is None or not total.num_messages:
            return
        if not small.num_messages:
            reasons = ", ".join(self.counts.sent.stock_reasons())
            rank_zero_warn(f"lightning_taco compressed nothing between stages in the first step: {reasons}.")
            return
        rank_zero_info(
            f"lightning_taco: first step: {report.format_bytes(small.stock_bytes)} sent to other stages as "
            f"{report.format_bytes(small.sent_bytes)} ({small.ratio:.2f}x)"
        )

    @staticmethod
    def _state(engine: PipelineEngine) -> dict[str, Any]:
        return {"step": engine.step.number}


@contextmanager
def _scopes(index: int, compression: Compression, activations: Activations | None) -> Iterator[None]:
    """Around the forward or the backward of micro-batch `index`."""
    if compression.session is not None:
        compression.session.start_microbatch(index)
    with ExitStack() as stack:
        if activations is not None and torch.is_grad_enabled():
            stack.enter_context(activations.scope())
        yield


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step returned {type(loss).__name__} for a micro-batch; under a pipeline it returns the loss, or "
            "a dictionary with a 'loss', for each."
        )
    return loss
