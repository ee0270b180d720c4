"""`CompressedStage`: torch's pipeline stage, whose sends and receives are messages of known size.

torch's schedules call a stage's methods: this class has its own for what arrives and leaves, and leaves to torch how a
stage runs backward, under FSDP2 too. What torch itself would receive into are tensors without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_taco import _compat
from lightning_taco.collectives.traffic import Direction
from lightning_taco.pipeline_parallel.failure import Failure
from lightning_taco.pipeline_parallel.transfers import Border, Moment, TensorSpec


def _no_scope(_: int) -> AbstractContextManager[None]:
    return nullcontext()


def _nothing(_: BaseException) -> None:
    """Go on."""


@dataclass
class Step:
    """What the stages of one rank share while a step runs.

    Attributes:
        inputs: of the first stage, by micro-batch.
        number: of the training step, for random numbers.
        failure: the first exception.
        on_failure: called with it; if it raises, the rank ends at once, else it goes on with zeros.
        forward_scope: entered around the forward of each micro-batch, which it is given.
        backward_scope: the same for backward.
        backward: runs backward from a loss in place of autograd; ``None`` for autograd.
    """

    inputs: list[tuple[Any, ...]] = field(default_factory=list)
    number: int = 0
    failure: Failure = field(default_factory=Failure)
    on_failure: Callable[[BaseException], None] = _nothing
    forward_scope: Callable[[int], AbstractContextManager[None]] = _no_scope
    backward_scope: Callable[[int], AbstractContextManager[None]] = _no_scope
    backward: Callable[[Tensor], None] | None = None

    def fail(self, error: BaseException, place: str) -> None:
        """Note the first exception, and go on or not."""
        if self.failure.error is None:
            self.failure.note(error, place)
            self.on_failure(error)


class CompressedStage(_compat.PipelineStageBetweenRanks):
    """One stage of a pipeline.

    Args:
        module: runs it; takes what the stage before returns.
        index: of the stage.
        num_stages: of the pipeline.
        inputs: what the stage takes.
        incoming: the border to the stage before; ``None`` for the first.
        outgoing: the border to the stage after; ``None`` for the last.
        step: shared by all stages of this rank.
        device: of the stage.
        group: the pipeline axis.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        inputs: Sequence[TensorSpec],
        incoming: Border | None,
        outgoing: Border | None,
        step: Step,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        outputs = () if outgoing is None else outgoing.specs
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=_without_elements(inputs),
            output_args=_without_elements(outputs),
            group=group,
        )
        self._incoming, self._outgoing, self._step = incoming, outgoing, step
        self._to_send: dict[tuple[Direction, int], list[Tensor]] = {}
        self._arriving: dict[tuple[Direction, int], list[Tensor]] = {}
        self._local: dict[tuple[Direction, int], tuple[Tensor | None, ...]] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what the stage before has packed."""
        return self._receive(self._incoming, "forward", fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients that the stage after has packed."""
        border = self._outgoing if self.has_backward else None
        return self._receive(border, "backward", bwd_chunk_id, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the messages of what `forward_one_chunk` has returned."""
        return self._send("forward", fwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the messages of the gradients that `backward_one_chunk` has computed."""
        return self._send("backward", bwd_chunk_id, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take what a stage of this same rank has returned, as it is."""
        self._local["forward", mb_index] = tuple(tensor.detach() for tensor in _as_tuple(prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradients for a stage of this same rank."""
        return self.bwd_cache.pop(mb_index, ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of a stage of this same rank."""
        if self.has_backward:
            self._local["backward", mb_index] = next_stage_bwd_outputs

    def clear_runtime_states(self) -> None:
        """Forget the step before."""
        super().clear_runtime_states()
        for states in (self.bwd_cache, self.backward_state, self._to_send, self._arriving, self._local):
            states.clear()

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the stage on a micro-batch, and pack what it returns."""
        inputs = self._step.inputs[fwd_chunk_id] if self.is_first else self._received_inputs(fwd_chunk_id)
        output = self._guarded(lambda: self._forward(fwd_chunk_id, inputs), f"forward of micro-batch {fwd_chunk_id}")
        if output is _FAILED:
            output = () if self._outgoing is None else self._outgoing.stand_ins(self.device)
            self._to_send["forward", fwd_chunk_id] = self._packed(self._outgoing, output, "forward", fwd_chunk_id)
        if self.has_backward:
            self.fwd_cache[fwd_chunk_id] = (_as_tuple(output), list(inputs))
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a micro-batch, of its inputs only without `full_backward`, and pack their gradients."""
        if not self.has_backward:
            return
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        output: Any = loss if self.is_last else outputs
        gradients = None if self.is_last else self._received_gradients(bwd_chunk_id)
        state = {"stage_output": output, "output_grads": gradients, "input_values": inputs}

        def run() -> None:
            grads = self._backward(bwd_chunk_id, state, full_backward, last_backward)
            self._hand_back(bwd_chunk_id, grads)

        if self._guarded(run, f"backward of micro-batch {bwd_chunk_id}") is _FAILED:
            self._hand_back(bwd_chunk_id, (None,) * len(inputs))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the other half of a backward that was of inputs only."""
        if not self.has_backward or self._step.failure.error is not None:
            return
        inputs, groups, output, gradients = self.backward_state.pop(bwd_chunk_id, (None,) * 4)
        if output is None:
            return
        kind = "full" if groups is None else "weight"
        state = {"stage_output": output, "output_grads": gradients, "input_values": inputs, "param_groups": groups}

        def run() -> None:
            with self._step.backward_scope(bwd_chunk_id), _compat.no_autocast(self.device):
                self.backward_maybe_with_nosync(kind, state, last_backward=last_backward)

        self._guarded(run, f"backward of the weights of micro-batch {bwd_chunk_id}")

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Let FSDP2 reduce what all micro-batches have added up."""
        if self.has_backward and self._step.failure.error is None:
            self._guarded(lambda: super(CompressedStage, self).perform_reduce_grad(grad_scale_factor), "reduction")

    def _forward(self, chunk: int, inputs: tuple[Any, ...]) -> Any:
        with self._step.forward_scope(chunk):
            output = self.forward_maybe_with_nosync(*inputs)
        if self._outgoing is not None:
            self._to_send["forward", chunk] = self._packed(self._outgoing, _as_tuple(output), "forward", chunk)
        return output

    def _backward(
        self, chunk: int, state: dict[str, Any], full_backward: bool, last_backward: bool
    ) -> tuple[Tensor | None, ...]:
        inputs = state["input_values"]
        with self._step.backward_scope(chunk), _compat.no_autocast(self.device):
            if not _needs_backward(state["stage_output"]):
                return (None,) * len(inputs)
            if self.is_last and self._step.backward is not None:
                return self._own_backward(state["stage_output"], inputs)
            if full_backward:
                return self.backward_maybe_with_nosync("full", state, last_backward=last_backward)[0]
            return self._input_backward(chunk, state, last_backward)

    def _input_backward(self, chunk: int, state: dict[str, Any], last_backward: bool) -> tuple[Tensor | None, ...]:
        grads: tuple[Tensor | None, ...] = (None,) * len(state["input_values"])
        groups = None
        # Where no input needs a gradient, torch would find no weights behind them: all is done with the weights then.
        if any(isinstance(value, Tensor) and value.requires_grad for value in state["input_values"]):
            state = {**state, "stage_output": _as_tuple(state["stage_output"])}
            grads, groups = self.backward_maybe_with_nosync("input", state, last_backward=last_backward)
        self.backward_state[chunk] = (state["input_values"], groups, state["stage_output"], state["output_grads"])
        return grads

    def _hand_back(self, chunk: int, grads: tuple[Tensor | None, ...]) -> None:
        """Pack the gradients of the inputs, or keep them for a stage of this same rank."""
        if self._incoming is None:
            return
        if self._is_elsewhere(self.stage_index - 1):
            self._to_send["backward", chunk] = self._packed(self._incoming, grads, "backward", chunk)
        else:
            self.bwd_cache[chunk] = tuple(grads)

    def _own_backward(self, loss: Tensor, inputs: list[Any]) -> tuple[Tensor | None, ...]:
        """`Step.backward`, where the user's module has a backward of its own: of inputs and weights at once."""
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        assert self._step.backward is not None
        self._step.backward(loss)
        grads = []
        for value in inputs:
            grads.append(value.grad if isinstance(value, Tensor) else None)
            if isinstance(value, Tensor):
                value.grad = None
        return tuple(grads)

    def _received_inputs(self, chunk: int) -> tuple[Tensor, ...]:
        assert self._incoming is not None
        local = self._local.pop(("forward", chunk), None)
        tensors = local if local is not None else self._unpacked(self._incoming, "forward", chunk)
        needs = self.has_backward and torch.is_grad_enabled()
        return tuple(
            tensor.requires_grad_(spec.requires_grad and needs)  # type: ignore[union-attr]
            for tensor, spec in zip(tensors, self._incoming.specs, strict=True)
        )

    def _received_gradients(self, chunk: int) -> tuple[Tensor | None, ...]:
        assert self._outgoing is not None
        local = self._local.pop(("backward", chunk), None)
        return local if local is not None else tuple(self._unpacked(self._outgoing, "backward", chunk))

    def _unpacked(self, border: Border, direction: Direction, chunk: int) -> list[Tensor | None]:
        messages = self._arriving.pop((direction, chunk), [])
        return border.unpack(messages, direction, self.device)

    def _packed(self, border: Border | None, tensors: Any, direction: Direction, chunk: int) -> list[Tensor]:
        peer = self.stage_index + (1 if direction == "forward" else -1)
        if border is None or not self._is_elsewhere(peer):
            return []
        return border.pack(tensors, direction, Moment(self._step.number, chunk), self.device)

    def _guarded(self, run: Callable[[], Any], what: str) -> Any:
        if self._step.failure.error is not None:
            return _FAILED
        try:
            return run()
        except Exception as error:
            self._step.fail(error, f"stage {self.stage_index}, {what}")
            return _FAILED

    def _receive(self, border: Border | None, direction: Direction, chunk: int, stage: int) -> list[dist.P2POp]:
        if border is None or not self._is_elsewhere(stage):
            return []
        buffers = self._arriving[direction, chunk] = border.buffers(direction, self.device)
        return [dist.P2POp(dist.irecv, buffer, self._peer(stage), self.group) for buffer in buffers]

    def _send(self, direction: Direction, chunk: int, stage: int) -> list[dist.P2POp]:
        messages = self._to_send.pop((direction, chunk), [])
        return [dist.P2POp(dist.isend, message, self._peer(stage), self.group) for message in messages]

    def _is_elsewhere(self, stage: int) -> bool:
        return self.stage_index_to_group_rank[stage] != self.group_rank

    def _peer(self, stage: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])


_FAILED = object()


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def _needs_backward(output: Any) -> bool:
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in _as_tuple(output))


def _without_elements(specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0, device="meta", requires_grad=spec.requires_grad) for spec in specs)
