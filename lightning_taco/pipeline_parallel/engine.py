"""Runs a user's step on a batch through the pipeline: forward and backward in training, forward alone otherwise.

On every rank, in order:

1. The batch is cut into micro-batches; the rank of the first stage listens to what the step gives to its model.
2. The ranks agree that they have batches of the same shapes and that nothing failed: no send has happened yet.
3. For shapes that are new, a plan is made: what crosses each border, stages of torch, and its schedule.
4. The schedule runs. On the rank of the last stage the step runs for each micro-batch, answered by its output.
5. The ranks agree that no stage failed, and get what the step returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_taco import _compat
from lightning_taco.collectives.traffic import TrafficCounters
from lightning_taco.pipeline_parallel.agreement import Agreement, number_of, structure_of
from lightning_taco.pipeline_parallel.answering import answered, heard_inputs
from lightning_taco.pipeline_parallel.local_stages import LocalStages
from lightning_taco.pipeline_parallel.microbatches import batch_size_of, cut_batch, merged, shapes_of
from lightning_taco.pipeline_parallel.schedules import make_schedule, num_usable
from lightning_taco.pipeline_parallel.settings import PipelineConfig
from lightning_taco.pipeline_parallel.shapes import outputs_by_stage, specs_of
from lightning_taco.pipeline_parallel.stage import CompressedStage, Step
from lightning_taco.pipeline_parallel.transfers import Border, Counts

UserStep = Callable[[nn.Module, Any], Any]
"""What a micro-batch is given to: takes the user's module, or a stand-in for it, and the micro-batch."""


class Outcome(NamedTuple):
    """What a step gave, on every rank."""

    result: Any
    """For the whole batch: see `microbatches.merged`."""
    num_microbatches: int


@dataclass
class _Plan:
    """What runs for batches of one shape."""

    schedule: Any
    num_microbatches: int


class PipelineEngine:
    """The pipeline of one process.

    Args:
        root: the user's module, whose model was cut (see `cutting.cut`).
        agreement: between the ranks of this pipeline.
        num_microbatches: into how many a batch is cut, at most.
        config: what is compressed between stages; ``None`` for nothing.
        replica: this process along the data-parallel axis.

    Attributes:
        stages: of this rank.
        module: the model.
        cut: how it was cut.
        counts: what crossed the borders of this rank's stages.
        step: what its stages share; a strategy sets its scopes.
        num_runs: batches so far.
    """

    def __init__(
        self,
        root: nn.Module,
        agreement: Agreement,
        num_microbatches: int,
        config: PipelineConfig | None,
        replica: int = 0,
    ) -> None:
        self.root, self.agreement = root, agreement
        self.stages = LocalStages(root)
        self.module, self.cut = self.stages.module, self.stages.cut
        self.num_microbatches, self.config, self.replica = num_microbatches, config, replica
        self.counts = Counts(TrafficCounters(), TrafficCounters())
        self.step = Step(on_failure=agreement.meet_peers)
        self.num_runs = 0
        self._seed = agreement.object_of(0, torch.initial_seed())
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._answer: Callable[[Any, int], Tensor] | None = None
        self._results: list[Any] = []

    @property
    def last_rank(self) -> int:
        """The rank along the pipeline axis that has the last stage."""
        return self.cut.layout.ranks[-1]

    def close(self) -> None:
        """Undo what was put in place."""
        self._plans.clear()
        self.stages.close()

    def run(
        self,
        batch: Any,
        user_step: UserStep,
        *,
        is_training: bool,
        loss_of: Callable[[Any], Tensor] | None = None,
        extra: Callable[[], Any] | None = None,
    ) -> tuple[Outcome, Any]:
        """Run one batch. All ranks call it.

        Args:
            batch: the same on all ranks.
            user_step: calls the model once.
            is_training: run backward too; gradients are added up in ``.grad``.
            loss_of: of what `user_step` returned for a micro-batch, the loss whose gradients are computed; of the
                micro-batches' the mean.
            extra: called on the rank of the last stage after the schedule: more that all ranks get.

        Returns:
            The outcome, and what `extra` returned, the same on all ranks.

        Raises:
            ValueError: for a batch that cannot be run; on every rank, before the first send.
            StageFailedError: when a stage of another rank has raised; that rank raises what it was.
        """
        self.step.failure.clear()
        self._results.clear()
        self.num_runs += 1
        if is_training:
            self.step.number += 1
        parts = self._prepared(batch, user_step)
        plan = self._agreed_plan(parts, batch, is_training)
        self._run_plan(plan, parts, user_step, loss_of, is_training=is_training)
        return self._shared(plan, extra)

    def _prepared(self, batch: Any, user_step: UserStep) -> list[Any]:
        """The micro-batches; what the first stage is given lies in `step` then."""
        try:
            size = batch_size_of(batch)
            parts = cut_batch(batch, num_usable(size, self.num_microbatches, self.cut.layout))
            self.step.inputs = []
            if 0 in self.stages.modules:
                self.step.inputs = [self._heard(user_step, part, index) for index, part in enumerate(parts)]
                self._check_alike()
            return parts
        except Exception as error:
            self.step.failure.note(error, "before the first stage")
            return []

    def _heard(self, user_step: UserStep, part: Any, index: int) -> tuple[Any, ...]:
        with self._same_random_numbers(index):
            return heard_inputs(self.root, self.module, lambda root: user_step(root, part))

    @contextmanager
    def _same_random_numbers(self, index: int) -> Iterator[None]:
        """Let a step draw alike on the ranks that listen to it and that answer it; generators are as before after."""
        devices = [self.agreement.device] if self.agreement.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(number_of(f"{self._seed}/{self.num_runs}/{index}"))
            yield

    def _check_alike(self) -> None:
        kinds = [_in_words(inputs) for inputs in self.step.inputs]
        if len(set(kinds)) > 1:
            raise ValueError(
                f"The micro-batches of one batch must have one shape, but the model is given {kinds[0]} in one and "
                f"{next(kind for kind in kinds if kind != kinds[0])} in another; pad them alike."
            )

    def _agreed_plan(self, parts: list[Any], batch: Any, is_training: bool) -> _Plan:
        shapes = shapes_of(batch) if self.step.failure.error is None else ""
        inputs = number_of(_in_words(self.step.inputs[0])) if self.step.inputs else 0
        has_failed = self.step.failure.error is not None
        rows = self.agreement.numbers(has_failed, number_of(shapes), inputs)
        if any(failed for failed, _, _ in rows):
            self.agreement.raise_failure(self.step.failure)
        if len({shape for _, shape, _ in rows}) > 1:
            given = " / ".join(self.agreement.objects(f"rank {dist.get_rank()}: {shapes}"))
            raise ValueError(
                f"The ranks of one pipeline must get the same batch, but its tensors differ: {given}. Shard the data "
                "over the data-parallel ranks only (trainer.strategy.distributed_sampler_kwargs)."
            )
        key = (is_training, torch.is_grad_enabled(), len(parts), rows[0][1], rows[self.cut.layout.ranks[0]][2])
        if key not in self._plans:
            self._plans[key] = self._make_plan(len(parts), is_training)
        return self._plans[key]

    def _make_plan(self, num_microbatches: int, is_training: bool) -> _Plan:
        layout = self.cut.layout
        given = self.step.inputs[0] if self.step.inputs else None
        with self.stages.running():
            outputs = outputs_by_stage(self.stages.modules, layout, given, self.agreement)
        config = self.config if is_training or (self.config and self.config.during_validation) else None
        reason = "evaluation" if self.config and not is_training else "compression is off"
        borders = [
            Border(stage, self.stages.border(stage), specs, config, self.counts, self.replica, reason)
            for stage, specs in enumerate(outputs)
        ]
        stages = [
            CompressedStage(
                module,
                stage,
                layout.num_stages,
                inputs=specs_of(given or ()) if stage == 0 else outputs[stage - 1],
                incoming=borders[stage - 1] if stage else None,
                outgoing=borders[stage] if stage + 1 < layout.num_stages else None,
                step=self.step,
                device=self.agreement.device,
                group=self.agreement.group,
            )
            for stage, module in self.stages.modules.items()
        ]
        schedule = make_schedule(stages, layout, num_microbatches, self._on_output, is_training=is_training)
        return _Plan(schedule, num_microbatches)

    def _run_plan(
        self,
        plan: _Plan,
        parts: Sequence[Any],
        user_step: UserStep,
        loss_of: Callable[[Any], Tensor] | None,
        *,
        is_training: bool,
    ) -> None:
        def answer(output: Any, index: int) -> Tensor:
            with self._same_random_numbers(index):
                result = answered(self.root, self.module, output, lambda root: user_step(root, parts[index]))
            self._results.append(result)
            return torch.zeros(()) if loss_of is None else loss_of(result) / len(parts)

        self._answer = answer
        # The loss function is told which micro-batch it is called for by its "target".
        target = torch.arange(plan.num_microbatches)
        run = plan.schedule.step if is_training else plan.schedule.eval
        try:
            with self.stages.running():
                run(target=target, return_outputs=False)
        finally:
            self._answer = None
            self.step.inputs = []

    def _on_output(self, output: Any, target: Tensor) -> Tensor:
        """The loss function of the schedule."""
        index = int(target[0])
        if self.step.failure.error is None:
            assert self._answer is not None
            try:
                with self.step.forward_scope(index):
                    return self._answer(output, index)
            except Exception as error:
                self.step.fail(error, f"the step on micro-batch {index}, after the last stage")
        return torch.zeros((), device=self.agreement.device)

    def _shared(self, plan: _Plan, extra: Callable[[], Any] | None) -> tuple[Outcome, Any]:
        is_source = self.last_rank == self.cut.rank
        tree, packed, key = None, None, 0
        if is_source and self.step.failure.error is None:
            try:
                tree = (merged(self._results), extra() if extra is not None else None)
                packed, key = structure_of(tree)
            except Exception as error:
                self.step.failure.note(error, "putting together what the step returned")
        self._results.clear()
        rows = self.agreement.numbers(self.step.failure.error is not None, key)
        if any(failed for failed, _ in rows):
            self.agreement.raise_failure(self.step.failure)
        result, more = self.agreement.share(tree, packed, rows[self.last_rank][1], self.last_rank)
        return Outcome(result, plan.num_microbatches), more


def _in_words(inputs: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        for value in _compat.leaves_of(tuple(inputs))
    )
