"""Whether ``min_bytes="auto"`` keeps its promise: no size is slower than 0.98x of the library's own exchange.

It takes what `lightning-taco bench` has measured, and times other sizes than those, between them and above::

    lightning-taco bench --output break_even.json
    torchrun --nproc-per-node 2 examples/benchmarks/never_slower.py break_even.json --output never_slower.json

The speed-up is that of what a run would do: of the chosen algorithm where it would compress, and 1 where it would not.
The exit status is 1 when one is below the promise.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_taco.bench.settings import CODEC_NAMES, BenchSettings
from lightning_taco.collectives.algorithms import KINDS
from lightning_taco.collectives.break_even import NEVER_SLOWER, BreakEven, Timing
from lightning_taco.collectives.break_even_file import load
from lightning_taco.collectives.calibration import Ladder, RankGroup, measure
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.topology import Topology

STEPS = (1.5, 2.5)
"""Sizes that are timed, in units of the next smaller one of the ladder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="break_even.json of the same ranks")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    group = dist.group.WORLD
    assert group is not None
    topology, break_even = load(arguments.measured)
    memory = PeerMemory.open(group, device)[0] if topology.has_peer_memory else None
    difference = topology.difference(Topology.of(group, device, memory is not None))
    if difference is not None:
        parser.error(f"{arguments.measured} was measured with other settings: {difference}")
    sizes = sorted({timing.num_bytes for timing in break_even.timings})
    others = tuple(int(step * size) for size in sizes for step in STEPS)
    known = {timing.codec for timing in break_even.timings}
    codecs = [codec for codec in BenchSettings(codecs=CODEC_NAMES).codec_configs() if str(codec) in known]
    ranks = RankGroup(group, device, hierarchy=Hierarchy.of(group), memory=memory)
    kinds = tuple(kind for kind in KINDS if any(timing.kind == kind for timing in break_even.timings))
    ladder = Ladder(sizes=sorted(others), rounds=arguments.rounds, kinds=kinds)
    rows = [row_of(timing, break_even) for timing in measure(ranks, codecs, ladder)]
    worst = min(rows, key=lambda row: row["speed_up"])
    if dist.get_rank() == 0:
        show(rows, worst)
        if arguments.output:
            arguments.output.write_text(
                json.dumps({"rows": rows, "worst": worst, "topology": topology.to_json()}, indent=1)
            )
    dist.destroy_process_group()
    sys.exit(int(worst["speed_up"] < NEVER_SLOWER))


def row_of(timing: Timing, break_even: BreakEven) -> dict[str, Any]:
    """What a run would do with a tensor of this size, and what that gains."""
    chosen = None
    for segment in break_even.segments[timing.kind, timing.codec]:
        chosen = segment.algorithm if segment.num_bytes <= timing.num_bytes else chosen
    gain = 1.0 if chosen is None else timing.stock_us / timing.algorithm_us[chosen]
    best = timing.stock_us / min(timing.algorithm_us.values())
    return {
        "exchange": timing.kind,
        "codec": timing.codec,
        "bytes": timing.num_bytes,
        "algorithm": chosen or "stock",
        "stock_us": timing.stock_us,
        "speed_up": gain,
        "best_speed_up": best,
    }


def show(rows: list[dict[str, Any]], worst: dict[str, Any]) -> None:
    print("  ".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{cell:>16.4g}" if isinstance(cell, float) else f"{cell!s:>16}" for cell in row.values()))
    print(f"worst: {worst['speed_up']:.3f}x, {worst['exchange']} of {worst['bytes']} bytes, {worst['codec']}")


if __name__ == "__main__":
    main()
