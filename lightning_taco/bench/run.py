"""One rank of a bench: checks what compressed exchanges give, times them; rank 0 prints and keeps the figures."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from lightning_taco.bench import plot
from lightning_taco.bench.checks import problem_of
from lightning_taco.bench.exchanges import Exchanges
from lightning_taco.bench.settings import BenchSettings
from lightning_taco.bench.table import print_figures
from lightning_taco.collectives.break_even import BreakEven, Timing
from lightning_taco.collectives.break_even_file import Measured, cache_path, save
from lightning_taco.collectives.calibration import Ladder, RankGroup, measure_contests
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.topology import Topology
from lightning_taco.config import CodecConfig

COPY_BYTES = {"cuda": 1 << 26, "cpu": 1 << 24}
NUM_COPIES = 20


def run(settings: BenchSettings, device: torch.device) -> int:
    """Time everything over the default process group; the exit status, the same on all ranks."""
    group = dist.group.WORLD
    assert group is not None
    memory = _mapped_memory(settings, group, device)
    ranks = RankGroup(group, device, hierarchy=Hierarchy.of(group), memory=memory)
    topology = Topology.of(group, device, memory is not None)
    exchanges = Exchanges.over(ranks, settings.codec_configs(), settings.kinds)
    problem = problem_of(exchanges, settings.kinds)
    if problem is not None:
        return _say(f"Nothing was timed, since a result is wrong: {problem}", 1)
    ladder = Ladder(sizes=settings.num_bytes(device.type), rounds=settings.rounds, kinds=settings.kinds)
    copy_rate = _copy_rate(ranks)
    measured = Measured(topology, BreakEven.of(_timings(exchanges, ladder)))
    return _show(settings, measured, exchanges.codecs_by_name, copy_rate) if dist.get_rank() == 0 else 0


def _mapped_memory(settings: BenchSettings, group: dist.ProcessGroup, device: torch.device) -> PeerMemory | None:
    if settings.transport != "auto":
        return None
    memory, reason = PeerMemory.open(group, device)
    if memory is None:
        _say(f"transport='auto': memory cannot be mapped, since {reason}; exchanges go over the process group.", 0)
    return memory


def _show(settings: BenchSettings, measured: Measured, codecs: Mapping[str, CodecConfig], copy_rate: float) -> int:
    print_figures(measured, codecs, copy_rate, Console())
    path = settings.output or cache_path()
    try:
        save(measured, path)
        print(f"Wrote {path}" + ("" if settings.output else ", which strategies with min_bytes='auto' read"))
        if settings.plot is not None:
            plot.save(measured.break_even, settings.plot)
            print(f"Wrote {settings.plot}")
    except OSError as error:
        where = error.filename or path
        return _say(f"{where} cannot be written ({error.strerror or error}); choose another place with --output.", 1)
    return 0


def _timings(exchanges: Exchanges, ladder: Ladder) -> list[Timing]:
    """With a progress bar on the terminal of rank 0."""
    console = Console(stderr=True)
    timings = []
    with Progress(console=console, transient=True, disable=dist.get_rank() != 0 or not console.is_terminal) as progress:
        task = progress.add_task("timing", total=len(ladder.sizes) * len(ladder.kinds))
        for timing in measure_contests(exchanges.ranks, ladder, exchanges.contest):
            timings.append(timing)
            progress.update(task, completed=len({(each.kind, each.num_bytes) for each in timings}))
    return timings


def _copy_rate(ranks: RankGroup) -> float:
    """GB/s that a copy within memory reads and writes, of the slowest rank."""
    source = torch.empty(COPY_BYTES[ranks.device.type], dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    target.copy_(source)
    ranks.meet()
    start = ranks.clock()
    for _ in range(NUM_COPIES):
        target.copy_(source)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    ((seconds,),) = ranks.slowest([[ranks.clock() - start]])
    return 2 * NUM_COPIES * source.numel() / seconds / 1e9


def _say(sentence: str, status: int) -> int:
    if dist.get_rank() == 0:
        print(sentence, file=sys.stderr)
    return status
