"""Several ranks in one test, without a launch.

The layers of this suite, cheapest first:

* pure functions, no rank at all;
* `run_threads`: each rank is a thread of this process and the collectives are torch's threaded group
  (about 0.02 s); for logic, for every invariant that does not depend on a transport;
* `run_forked`: each rank is a forked process and the collectives are gloo over a file store (about 0.1 s);
  for bytes on a real wire, and for what lives once per process, such as the seam and Lightning's strategies;
* tests marked `launch` start real processes through Lightning's launcher (10 s each, a handful);
* tests marked `gpu` and `multigpu` need CUDA devices and are not collected into a CPU run.
"""

import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_taco import _compat


def run_threads(world_size: int, function: Callable[[int], Any], timeout_s: float = 60) -> list[Any]:
    """Run `function(rank)` on `world_size` threads with a default process group; return the results by rank.

    torch 2.11 crashes when two threads propagate DTensor shardings at the same time, so there ranks are forked instead:
    results must be picklable, and a function may not count on memory that it shares with other ranks.
    """
    if _compat.torch_version() < (2, 12):
        return run_forked(world_size, function, timeout_s)
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    world = threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: queue.Queue[tuple[int, BaseException]] = queue.Queue()

    def worker(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failures.put((rank, error))
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if world == dist.distributed_c10d._world:
                dist.destroy_process_group()

    threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not failures.empty():
            _, error = failures.get()
            raise error
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"ranks as threads did not end within {timeout_s} s")
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
    return results


def run_forked(world_size: int, function: Callable[[int], Any], timeout_s: float = 120) -> list[Any]:
    """Run `function(rank)` in `world_size` forked processes over gloo; return the (pickled) results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, world_size, function, folder) for rank in range(world_size)]
        deadline = time.monotonic() + timeout_s
        outcomes: list[tuple[bool, Any]] = []
        for rank, (pid, read_end) in enumerate(children):
            outcomes.append(_collect(rank, pid, read_end, deadline))
    # The first cause, not the peers' "connection closed by peer" that follows from it.
    failures = [text for succeeded, text in outcomes if not succeeded]
    if failures:
        failures.sort(key=lambda text: "Connection closed by peer" in text or "Connection reset" in text)
        raise AssertionError("\n".join(failures))
    return [value for _, value in outcomes]


def _fork(rank: int, world_size: int, function: Callable[[int], Any], folder: str) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    os.close(read_end)
    status = 1
    try:
        # Without this line the child inherits an OpenMP pool whose threads did not survive the fork, and hangs.
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world_size,
            store=dist.FileStore(f"{folder}/store", world_size),
            timeout=timedelta(seconds=60),
        )
        outcome = (True, function(rank))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        outcome = (False, f"rank {rank}:\n{traceback.format_exc()}")
    with os.fdopen(write_end, "wb") as pipe:
        pickle.dump(outcome, pipe)
    os._exit(status)


def _collect(rank: int, pid: int, read_end: int, deadline: float) -> tuple[bool, Any]:
    timer = threading.Timer(max(0.1, deadline - time.monotonic()), os.kill, (pid, 9))
    timer.start()
    try:
        with os.fdopen(read_end, "rb") as pipe:
            payload = pipe.read()
        os.waitpid(pid, 0)
    finally:
        timer.cancel()
    if not payload:
        return False, f"rank {rank}: ended without a result (killed after the time limit, or crashed)"
    return pickle.loads(payload)
