"""The only place that looks at the versions of torch, triton and lightning, and at what a device can do."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 13)
FP8_CAPABILITY = (8, 9)
ACCUMULATE_NODE = "torch::autograd::AccumulateGrad"
REENTRANT_CHECKPOINT_NODE = "CheckpointFunctionBackward"
# Backward functions of what only moves or casts values: behind a chain of them a parameter is still that parameter.
MOVING_NODES = frozenset(
    f"{name}Backward{suffix}"
    for name in ("ToCopy", "View", "Alias", "T", "Transpose", "Permute", "Clone", "Reshape", "UnsafeView", "Detach")
    for suffix in ("", "0")
) | {"RedistributeBackward", "_FromTorchTensorBackward", "_ToTorchTensorBackward"}


# torch 2.13 renamed them and warns at each call of the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def torch_version() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    return _major_minor(torch.__version__)


def library_versions(device: torch.device) -> dict[str, str]:
    """Versions of what moves and computes on `device`: two that differ may differ in speed."""
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def require_known_torch() -> None:
    """Refuse a torch whose redistribution this package was not tested with.

    Raises:
        RuntimeError: outside the supported range, naming the range and the remedy.
    """
    if not OLDEST_TORCH <= torch_version() <= NEWEST_TORCH:
        oldest, newest = ".".join(map(str, OLDEST_TORCH)), ".".join(map(str, NEWEST_TORCH))
        raise RuntimeError(
            f"torch {torch.__version__} is installed, but lightning_taco compresses the redistribution of DTensor in "
            f"torch {oldest} to {newest} only, since it changes at each minor release. Install "
            f"'torch>={oldest},<{NEWEST_TORCH[0]}.{NEWEST_TORCH[1] + 1}', or pass compression=None."
        )


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether triton can be imported; without it the torch reference runs everywhere."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=8)
def has_native_fp8(device_index: int) -> bool:
    """Whether this CUDA device converts to E4M3 in hardware (compute capability 8.9 and later)."""
    return torch.cuda.get_device_capability(device_index) >= FP8_CAPABILITY


def supports_fp8(device: torch.device) -> bool:
    """Whether ``element="auto"`` means E4M3 on this device: CPU, and CUDA from compute capability 8.9 on."""
    if device.type != "cuda":
        return True
    return has_native_fp8(device.index if device.index is not None else torch.cuda.current_device())


def _major_minor(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise RuntimeError(f"cannot read the version {version!r}")
    return int(match.group(1)), int(match.group(2))


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (a recomputed forward included)."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint_recompute() -> bool:
    """Whether this thread is repeating a forward for activation checkpointing."""
    node = torch._C._current_autograd_node()
    if node is not None and node.name() == REENTRANT_CHECKPOINT_NODE:
        return True
    hook = _top_saved_tensor_hook()
    return hook is not None and hook.__qualname__.startswith("_recomputation_hook")


def checkpoint_frame() -> Any:
    """The non-reentrant checkpoint that this thread runs, or repeats, the forward of; ``None`` outside of one.

    The same object both times, so what is noted on it in forward is there when the forward is repeated.
    """
    hook = _top_saved_tensor_hook()
    if hook is None or not hook.__qualname__.startswith(("_checkpoint_hook", "_recomputation_hook")):
        return None
    function = inspect.unwrap(hook)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    if "frame" in cells:
        return cells["frame"].cell_contents
    return cells["target_frame_ref"].cell_contents() if "target_frame_ref" in cells else None


def saved_tensor_hooks() -> tuple[Any, ...]:
    """The innermost saved-tensor hooks of this thread: pack and unpack, or nothing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) or ()


def _top_saved_tensor_hook() -> Any:
    hooks = saved_tensor_hooks()
    return hooks[0] if hooks and hasattr(hooks[0], "__qualname__") else None


def is_parameter_gradient_exchange() -> bool:
    """Whether the backward function that runs now moves, or adds up, the gradient of a parameter."""
    node = torch._C._current_autograd_node()
    return node is not None and leads_to_parameter(node)


def leads_to_parameter(node: Any) -> bool:
    """Whether behind `node`, and functions that only move or cast, lies the accumulated gradient of a parameter."""
    while node is not None:
        if node.name() == ACCUMULATE_NODE:
            return isinstance(getattr(node, "variable", None), torch.nn.Parameter)
        if node.name() not in MOVING_NODES:
            return False
        following = [successor for successor, _ in node.next_functions if successor is not None]
        node = following[0] if len(following) == 1 else None
    return False


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter, or a cast or a view of one."""
    return isinstance(tensor, torch.nn.Parameter) or (tensor.grad_fn is not None and leads_to_parameter(tensor.grad_fn))


def register_first(module: torch.nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> RemovableHandle:
    """Register a forward pre-hook that runs before those that `module` has."""
    handle = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
    # torch 2.11's Dynamo guards read these OrderedDicts in the order of memory, which after a prepend is not that of
    # iteration, and fail: lay them out anew.
    tables: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    for hooks in tables:
        items = list(hooks.items())
        hooks.clear()
        hooks.update(items)
    return handle


def function_modes() -> list[Any]:
    """The modes that stand between this thread's code and torch's functions, innermost last."""
    return list(torch.overrides._get_current_function_mode_stack())


def storage_pointer(tensor: torch.Tensor) -> int:
    """Address of the memory that `tensor` is a view of; 0 for none (empty, meta or fake tensors)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or what an asynchronous functional collective has brought: until it is waited for, such a tensor
    has no address to give to a kernel. On CUDA the stream waits, not the host."""
    return tensor.wait() if isinstance(tensor, funcol.AsyncCollectiveTensor) else tensor


def asynchronous(tensor: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
    """`tensor` as an asynchronous functional collective would give it: `wait` is called once, when it is first used.

    Views do not use it. torch finds what to wait for by the tensor's memory.
    """
    from torch._C._distributed_c10d import PythonCallbackWork, _register_work

    def callback(_: timedelta) -> bool:
        wait()
        return True

    _register_work(tensor, PythonCallbackWork(callback))
    return funcol.AsyncCollectiveTensor(tensor)


def is_tracing() -> bool:
    """Whether operations are being recorded into a graph (torch.compile, make_fx) instead of executed."""
    return funcol._are_we_tracing()


def process_group(group: Any) -> dist.ProcessGroup | None:
    """The process group behind what DTensor hands to a functional collective: (mesh, axis), a mesh, a group, a name."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, tuple) and len(group) == 2:
        return group[0].get_group(group[1])
    if isinstance(group, str):
        return resolve_group(group)
    if isinstance(group, DeviceMesh):
        return group.get_group() if group.ndim == 1 else None
    return None


def stock_exchange(tensor: torch.Tensor, kind: str, op: str, dim: int, scatter_dim: int, group: Any) -> torch.Tensor:
    """What the library itself does for one of the four exchanges, without the stand-ins of this package."""
    if kind == "all_to_all" and tensor.device.type == "cuda":
        return torch.ops._dtensor.shard_dim_alltoall(tensor, dim, scatter_dim, group.group_name)
    if kind == "all_reduce":
        return waited(funcol.all_reduce(tensor, op, group))
    if kind == "reduce_scatter":
        reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
        return waited(reduce_scatter(tensor, op, dim, group))
    all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    gathered = waited(all_gather(tensor, dim, group))
    if kind == "all_gather":
        return gathered
    return gathered.chunk(group.size(), scatter_dim)[group.rank()].contiguous()


def symmetric_memory(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Bytes of this rank that all ranks of `group` map, and the handle of the mapping. All ranks call it.

    Raises:
        RuntimeError: when the GPUs cannot map each other's memory, or this torch has no such memory.
    """
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no symmetric memory: {error}") from error
    own = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    return own, _symmetric_memory.rendezvous(own, group)


def agree_by_store(name: str, rank: int, num_ranks: int, timeout: timedelta) -> bool:
    """Say `name` to the other ranks over the process group's store, and wait for all; whether all came in time."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    store.set(str(rank), "1")
    try:
        store.wait([str(peer) for peer in range(num_ranks)], timeout)
    except RuntimeError:  # a peer is gone
        return False
    return True


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group that was registered under `name`."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def reduction_factor(op: Any, world_size: int) -> float | None:
    """What `op` multiplies a sum over `world_size` ranks by; ``None`` for a reduction that is no sum."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.PREMUL_SUM:
        # Its factor is in what pickle keeps of it only; a tensor in place of a number is not ours to read.
        factor = op.__getstate__()[1] if hasattr(op, "__getstate__") else None
        return float(factor) if isinstance(factor, float) else None
    return None


def fsdp_param_groups(module: torch.nn.Module) -> list[Any]:
    """The parameter groups that FSDP2 gathers and reduces together for `module`; several with a mesh per parameter."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Backward as it runs outside of autocast, although a schedule runs it within."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


class PipelineStageBetweenRanks(PipelineStage):
    """torch's pipeline stage, which, to open communicators, sends nothing from a rank to itself: gloo cannot."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` is what `torch.compile` made of another."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule) if "torch._dynamo" in sys.modules else False


def original_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` made `module` of."""
    return module._orig_mod  # type: ignore[return-value]


def flattened(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The leaves of nested containers, and what builds the same of other leaves."""
    leaves, structure = tree_flatten(tree)
    return leaves, lambda others: tree_unflatten(others, structure)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of nested containers."""
    return tree_flatten(tree)[0]


@contextmanager
def evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    """`module` as after ``eval()``; each module in it goes back to the mode that it was in."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes:
            child.training = mode


def replace_replica_group(param_group: Any, group: dist.ProcessGroup) -> Callable[[], None]:
    """Let FSDP2 all-reduce the gradients of one of its parameter groups, under HSDP, over `group`.

    FSDP2 takes no custom all-reduce: ``set_all_reduce_hook`` runs after its own. It asks this group for it.

    Returns:
        What puts the group of the mesh back.
    """
    mesh_info = param_group.mesh_info
    before = mesh_info.replicate_process_group
    mesh_info.replicate_process_group = group

    def restore() -> None:
        mesh_info.replicate_process_group = before

    return restore
