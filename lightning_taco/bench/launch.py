"""The processes of a bench: those that torchrun has started, or its own."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from lightning_taco.bench.run import run
from lightning_taco.bench.settings import BenchSettings

TIME_LIMIT = timedelta(minutes=5)
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class BenchError(Exception):
    """What the user has to change, in a sentence."""


class Place(NamedTuple):
    """One rank of the bench."""

    rank: int
    num_ranks: int
    device: torch.device


def run_ranks(settings: BenchSettings) -> int:
    """Time everything on all ranks; the exit status of this process.

    Raises:
        BenchError: when this machine has not what the settings ask for.
    """
    if all(name in os.environ for name in OF_TORCHRUN):
        return _run_under_torchrun(settings)
    device_type = chosen_device(settings, torch.cuda.device_count(), settings.num_ranks)
    num_ranks = settings.num_ranks or (torch.cuda.device_count() if device_type == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        # No fork beside CUDA; without it, a fork spares importing everything again.
        method = "spawn" if device_type == "cuda" else "fork"
        arguments = (settings, device_type, num_ranks, os.path.join(folder, "store"))
        try:
            processes.start_processes(_run_rank, arguments, nprocs=num_ranks, start_method=method)
        except processes.ProcessExitedException as ended:
            return ended.exit_code or 1
    return 0


def chosen_device(settings: BenchSettings, num_gpus: int, num_ranks: int | None) -> str:
    """``"cuda"`` or ``"cpu"``.

    Args:
        settings: with the user's choice.
        num_gpus: of this machine.
        num_ranks: on this machine; ``None`` for as many as there are GPUs.

    Raises:
        BenchError: for CUDA without a GPU for each rank.
    """
    is_enough = num_gpus >= (num_ranks or 2)
    if settings.device == "cuda" and not is_enough:
        raise BenchError(
            f"device=cuda needs a GPU for each of {num_ranks or 2} ranks, but this machine has {num_gpus}; use "
            "--device cpu, or fewer ranks."
        )
    return "cuda" if is_enough and settings.device != "cpu" else "cpu"


def _run_under_torchrun(settings: BenchSettings) -> int:
    num_ranks = int(os.environ["WORLD_SIZE"])
    if num_ranks < 2 or settings.num_ranks not in (None, num_ranks):
        raise BenchError(
            f"torchrun has started {num_ranks} process(es); it takes two or more, and num_ranks="
            f"{settings.num_ranks} has to be left out or the same. Use torchrun --nproc-per-node N."
        )
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    device_type = chosen_device(settings, torch.cuda.device_count(), num_local)
    place = _place(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), num_ranks, device_type)
    return _run_in_group(settings, place, "env://")


def _run_rank(rank: int, settings: BenchSettings, device_type: str, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)  # as torchrun has it; and a forked process has lost the pool's threads
    status = _run_in_group(settings, _place(rank, rank, num_ranks, device_type), f"file://{store}")
    if status:
        raise SystemExit(status)


def _place(rank: int, local_rank: int, num_ranks: int, device_type: str) -> Place:
    if device_type == "cpu":
        return Place(rank, num_ranks, torch.device("cpu"))
    torch.cuda.set_device(local_rank)
    return Place(rank, num_ranks, torch.device("cuda", local_rank))


def _run_in_group(settings: BenchSettings, place: Place, method: str) -> int:
    is_cuda = place.device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=method,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=TIME_LIMIT,
        device_id=place.device if is_cuda else None,
    )
    try:
        return run(settings, place.device)
    finally:
        dist.destroy_process_group()
