"""`TacoTPStrategy` for ``lightning.fabric.Fabric``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.types import _PATH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_taco import _compat
from lightning_taco.activations import ActivationConfig, resolve_activations
from lightning_taco.config import CompressionConfig
from lightning_taco.data_parallel import DataParallelConfig
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.strategies import arguments, checkpoints, checks
from lightning_taco.strategies.activations import Activations
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.data_parallel import DataParallel, devices_per_node
from lightning_taco.strategies.gradients import (
    clip_gradients_by_norm,
    clip_gradients_by_value,
    is_norm_right_in_torch,
)
from lightning_taco.strategies.weight_tying import preserve_tied_parameters


class TacoTPStrategy(ModelParallelStrategy):
    """Tensor parallelism (and FSDP2 beside it) whose exchanges of intermediate tensors are compressed.

    Lightning Fabric's `ModelParallelStrategy` with compressed redistribution, in the forward of a module that was set
    up with this strategy and in ``fabric.backward``. What the training loop itself redistributes, such as a loss, is
    exact. ``fabric.save`` and ``fabric.load`` keep the state of the compression too, of their own accord.

    Args:
        parallelize_fn: takes the module and the device mesh (axes ``"data_parallel"``, ``"tensor_parallel"``), returns
            the parallelised module.
        compression: a recipe name (``"default"``, ``"taco"``, ``"int8"``, ``"none"``), a `CompressionConfig`, or
            ``None``: off, and bit-equal to `ModelParallelStrategy`.
        data_parallel: what travels between data-parallel ranks: ``"sdp4bit"`` (gradients in 8 bits inside a node and 4
            between nodes, FSDP2's weights as 4-bit differences), ``"tlq_hs"`` (its gradients only), ``"quangrad"``
            (gradients kept and sent in FP8 blocks), a `DataParallelConfig`, or ``None``: off. When on, parameters that
            FSDP2 does not shard are averaged too, so plain data parallelism needs ``tensor_parallel_size=1`` only.
        data_parallel_size: ranks along the data-parallel axis; ``"auto"`` is the number of nodes.
        tensor_parallel_size: ranks along the tensor-parallel axis; ``"auto"`` is the number of devices of a node.
        sample_every_n_steps: every how many steps the reconstruction error is measured; 0 for never.
        save_distributed_checkpoint: save a folder with a file per rank; ``False`` assembles one file on rank 0.
        process_group_backend: ``"nccl"``, ``"gloo"``; by default the one of the device.
        timeout: limit of a collective, seconds or a ``timedelta``.
        activations: how what backward needs is stored: ``"agoq"`` (4 bits a value), an `ActivationConfig`, or ``None``
            for stock autograd.

    Raises:
        ValueError: for an unknown codec or recipe, or sizes whose product is not the number of processes.
        RuntimeError: under a torch whose redistribution is not known.

    Example::

        strategy = lightning_taco.fabric.TacoTPStrategy(parallelize_fn)
        fabric = Fabric(accelerator="gpu", devices=2, strategy=strategy)
        ...
        strategy.print_end_table()
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        compression: CompressionConfig | str | None = "default",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        sample_every_n_steps: int = 50,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = default_pg_timeout,
        activations: ActivationConfig | str | None = None,
        data_parallel: DataParallelConfig | str | None = None,
    ) -> None:
        super().__init__(
            parallelize_fn=parallelize_fn,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=arguments.checked_timeout(timeout),
        )
        self.compression = Compression(
            arguments.checked_compression(compression), arguments.checked_sampling(sample_every_n_steps)
        )
        self.activations = Activations(resolve_activations(activations))
        self.data_parallel = DataParallel(arguments.checked_data_parallel(data_parallel))
        self._handles: list[RemovableHandle] = []
        self._open_scopes: list[AbstractContextManager[None]] = []
        self._backward_sync_control = _BackwardSync(self)

    @property
    def session(self) -> CompressionSession | None:
        """The running compression; ``None`` before a module is set up, after teardown, and when it is off."""
        return self.compression.session

    @override
    def _configure_launcher(self) -> None:
        # The first moment at which the number of processes is known, and before any is started.
        sizes = (self._data_parallel_size, self._tensor_parallel_size)
        checks.check_processes(self.parallel_devices, *sizes, self.num_nodes)
        super()._configure_launcher()

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        with preserve_tied_parameters(module):
            module = super().setup_module(module)
        self.compression.start(module, self.device_mesh, self.root_device)
        self._put_forward_in_scope(module)
        self.activations.start(module)
        self.data_parallel.start(module, self.device_mesh, devices_per_node(self.parallel_devices))
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        optimizer = super().setup_optimizer(optimizer)
        self.data_parallel.attach_optimizers([optimizer])
        return optimizer

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, nn.Module | Optimizer | Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        own_state = self.compression.state_dict()
        if own_state is not None:
            state = {**state, checkpoints.COMPRESSION_STATE: own_state}
        data_parallel_state = self.data_parallel.state_dict()
        if data_parallel_state is not None:
            state = {**state, checkpoints.DATA_PARALLEL_STATE: data_parallel_state}
        super().save_checkpoint(path, state, storage_options, filter)

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        values = state.values() if isinstance(state, dict) else [state]
        with ExitStack() as stack:
            for module in values:
                if isinstance(module, nn.Module):
                    stack.enter_context(checkpoints.without_wrappers(module))
            remainder = super().load_checkpoint(path, state, strict, weights_only)
        own_state = remainder.pop(checkpoints.COMPRESSION_STATE, None)
        if own_state is not None:
            self.compression.load_state_dict(own_state)
        self.data_parallel.load_state_dict(remainder.pop(checkpoints.DATA_PARALLEL_STATE, None))
        return remainder

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self.activations.report_first_step()
        with self.compression.backward_scope():
            super().backward(tensor, module, *args, **kwargs)
        self.data_parallel.finish_backward()

    @override
    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        # A DTensor loss that is averaged over ranks: c10d knows plain tensors only.
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return super().all_reduce(tensor, group, reduce_op)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        if self.compression.config is None and is_norm_right_in_torch(parameters):  # off is off, to the last bit
            return torch.nn.utils.clip_grad_norm_(
                parameters, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
            )
        return clip_gradients_by_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        clip_gradients_by_value(parameters, clip_val)

    def print_end_table(self) -> None:
        """Print, on rank 0, what was sent and stored, and what it cost. A Fabric script calls it when it is done."""
        self.compression.print_end_table()
        self.activations.print_table()
        self.data_parallel.print_end_table()

    @override
    def teardown(self) -> None:
        """Remove every hook and patched name; Fabric does not call this, a script may."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._open_scopes:  # of forwards that a KeyboardInterrupt ended: torch runs no hook for it
            self._open_scopes.pop().__exit__(None, None, None)
        self.compression.stop()
        self.activations.stop()
        self.data_parallel.stop()
        # In place of super().teardown(), which asks for a CheckpointIO that ModelParallelStrategy refuses to have.
        self.precision.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()

    def _put_forward_in_scope(self, module: nn.Module) -> None:
        """Open the compression's scope around each forward of `module`."""
        if not self.compression.is_on:
            return

        def before(module: nn.Module, _: Any) -> None:
            scope = self.compression.forward_scope(is_training=module.training)
            scope.__enter__()
            self._open_scopes.append(scope)

        def after(*_: Any) -> None:
            if self._open_scopes:
                self._open_scopes.pop().__exit__(None, None, None)

        self._handles.append(_compat.register_first(module, before))
        self._handles.append(module.register_forward_hook(after, always_call=True))


class _BackwardSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``: Lightning's own without ``data_parallel=``, else `DataParallel.no_sync`."""

    def __init__(self, strategy: TacoTPStrategy) -> None:
        self._strategy = strategy
        self._stock = strategy._backward_sync_control

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        data_parallel = self._strategy.data_parallel
        if not data_parallel.is_on:
            assert self._stock is not None
            return self._stock.no_backward_sync(module, enabled)
        return data_parallel.no_sync() if enabled else nullcontext()
