"""Exchanges through mapped memory. Ranks are threads here, so that all of them can write to each other's addresses.

The device's barrier is stood in for by one of threads, and Triton's interpreter encodes. The real mapping is in
`test_multigpu`.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.collectives import all_gather, all_reduce, all_to_all, peer_memory, reduce_scatter
from lightning_taco.collectives.algorithms import algorithms_of, exchange
from lightning_taco.collectives.peer_memory import PeerMemory, PeerTransport
from lightning_taco.config import CodecConfig, CompressionConfig
from tests.ranks import run_forked, run_threads
from tests.test_codec_reference import assert_same_bits, sample

pytestmark = pytest.mark.interpreter
INT8 = CodecConfig(element="int8", block_size=32)
INT4 = CodecConfig(element="int4", block_size=32, rounding="stochastic")
CPU = torch.device("cpu")


@dataclass
class Handle:
    """What torch's symmetric memory gives, as far as it is used."""

    buffer_ptrs: list[int]
    meeting: threading.Barrier
    num_meetings: int = 0

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert (channel, timeout_ms) == (0, peer_memory.TIMEOUT_MS)
        self.num_meetings += 1
        self.meeting.wait(20)


class Rendezvous:
    """Stands in for `_compat.symmetric_memory`: threads meet and see each other's tensors."""

    def __init__(self, world: int) -> None:
        self.meeting = threading.Barrier(world)
        self.buffers: dict[tuple[int, int], Tensor] = {}
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Handle]:
        own = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.buffers[group.rank(), num_bytes] = own
        self.meeting.wait(20)
        if group.rank() == 0:
            self.sizes.append(num_bytes)
        pointers = [self.buffers[rank, num_bytes].data_ptr() for rank in range(group.size())]
        self.meeting.wait(20)
        return own, Handle(pointers, self.meeting)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[int, dist.ProcessGroup], Any]], list[Any]]:
    """Runs a body on threads whose memory is mapped, from 1 KiB a half on."""
    kernels = pytest.importorskip("lightning_taco.codec.kernels")
    launch, one_at_a_time = kernels.launch, threading.Lock()

    def locked(*args: Any) -> None:
        with one_at_a_time:  # the interpreter patches Triton's modules while it runs
            launch(*args)

    monkeypatch.setattr(kernels, "launch", locked)
    monkeypatch.setattr(peer_memory, "FIRST_BYTES", 1 << 10)
    monkeypatch.setattr(peer_memory, "_reason_against", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def run(world: int, body: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
        monkeypatch.setattr(_compat, "symmetric_memory", Rendezvous(world))

        def on_rank(rank: int) -> Any:
            assert dist.group.WORLD is not None
            return body(rank, dist.group.WORLD)

        return run_threads(world, on_rank)

    return run


@pytest.mark.parametrize(("world", "steps"), [(2, [(INT4, 2), (INT8, 40)]), (3, [(INT4, 2)])])
def test_mapped_memory_has_the_bits_of_the_process_group(
    world: int, steps: list[tuple[CodecConfig, int]], mapped: Any
) -> None:
    """Exchanges after one another, over regions that grow: one that was reused too early would show."""

    def body(rank: int, group: dist.ProcessGroup) -> int:
        memory, reason = PeerMemory.open(group, CPU)
        assert reason == ""
        assert memory is not None
        for step, (codec, rows) in enumerate(steps):
            mine = sample("student_t3", rows, 32 * world).roll(rank) * (1 + step)

            def results(by: Any, mine: Tensor = mine, codec: CodecConfig = codec, step: int = step) -> list[Tensor]:
                slices = {"num_slices": 1 if by is group else 2}
                found = [
                    all_reduce(mine, codec, by, op="avg", seed=step, **slices),
                    reduce_scatter(mine, codec, by, dim=1, seed=step),
                ]
                if world == 2:
                    found.append(all_gather(mine, codec, by, dim=1, seed=step))
                    found.append(all_to_all(mine, codec, by, gather_dim=1, scatter_dim=0, seed=step))
                return found

            for ours, others in zip(results(PeerTransport(memory)), results(group), strict=True):
                assert_same_bits(ours, others)
        return memory._memory.region_bytes

    region_bytes = mapped(world, body)
    assert set(region_bytes) == {6144 if world == 2 else 1024}, "whole KiB that hold all rows"


def test_exchange_takes_mapped_memory_where_there_is_any(mapped: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        memory, _ = PeerMemory.open(group, CPU)
        assert memory is not None
        values = torch.full((1, 32), float(rank + 1))
        counts = []
        for algorithm in (None, "peer_memory", "one_shot"):
            before = memory._memory.handle.num_meetings
            result = exchange("all_reduce", values, INT8, group, algorithm=algorithm, memory=memory)
            assert_same_bits(result, torch.full((1, 32), 3.0))
            counts.append(memory._memory.handle.num_meetings - before)
        return counts

    assert mapped(2, body) == [[1, 1, 0]] * 2, "one meeting a message, and none where the process group was chosen"


def test_a_graph_meets_before_each_message_too(mapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = threading.local()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(capturing, "on", False))

    def body(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        memory, _ = PeerMemory.open(group, CPU)
        assert memory is not None
        values = torch.ones(1, 32)
        capturing.on = True
        with pytest.raises(RuntimeError, match="cannot be mapped while a CUDA graph is captured; run one step before"):
            memory.message_buffer(1, 1 << 20)
        all_reduce(values, INT8, PeerTransport(memory))
        capturing.on = False
        during = memory._memory.handle.num_meetings
        all_reduce(values, INT8, PeerTransport(memory))  # it may follow a replay, which has used any half last
        return during, memory._memory.handle.num_meetings

    for during, after in mapped(2, body):
        assert during == 2
        assert after == 4


def test_a_nan_is_loud_through_mapped_memory(mapped: Any) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Tensor:
        memory, _ = PeerMemory.open(group, CPU)
        assert memory is not None
        values = torch.ones(2, 64)
        values[1, 40] = math.inf if rank else 1.0
        return all_reduce(values, INT8, PeerTransport(memory))

    for total in mapped(2, body):
        assert total[1, 32:].isnan().all()
        assert total.isnan().sum() == 32


def test_what_stands_in_the_way_is_said_on_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> list[str]:
        group = dist.group.WORLD
        assert group is not None
        reasons = [PeerMemory.open(group, CPU)[1]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_memory, "_reason_against", lambda device: None)
            patch.setattr("platform.node", lambda: f"host{rank}")
            reasons.append(PeerMemory.open(group, CPU)[1])
            patch.setattr("platform.node", lambda: "host")

            def fails(*_: Any) -> Any:
                raise RuntimeError("peer access is off\nsecond line")

            if rank == 1:  # one rank alone is enough
                patch.setattr(_compat, "symmetric_memory", fails)
            else:
                patch.setattr(_compat, "symmetric_memory", lambda *_: (torch.zeros(8), Handle([0, 0], None)))  # type: ignore[arg-type]
            memory, reason = PeerMemory.open(group, CPU)
            assert memory is None
            reasons.append(reason)
        return reasons

    expected = [
        "the ranks compute on cpu, and it takes GPUs of one host",
        "the ranks are on 2 hosts",
        "the GPUs cannot map each other's memory (peer access is off)",
    ]
    assert run_forked(2, body) == [expected] * 2
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert peer_memory._reason_against(torch.device("cuda")) == "NCCL_P2P_DISABLE is set"


def test_memory_is_kept_when_a_rank_does_not_come() -> None:
    def body(rank: int) -> list[bool]:
        wait = timedelta(seconds=0.2 if rank == 0 else 5)
        together = _compat.agree_by_store("both", rank, 2, timedelta(seconds=5))
        alone = rank == 1 or _compat.agree_by_store("alone", rank, 2, wait)
        return [together, alone]

    assert run_forked(2, body) == [[True, False], [True, True]]


def test_peer_memory_is_an_algorithm_where_there_is_any() -> None:
    assert algorithms_of("all_reduce", 2, has_peer_memory=True) == ("one_shot", "peer_memory", "peer_memory/2")


def test_transport_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="transport='nvlink' is unknown; use one of"):
        CompressionConfig(transport="nvlink")  # type: ignore[arg-type]
