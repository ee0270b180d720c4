"""Codec kernels against a copy, and compressed collectives, by every way that they can go, against NCCL's own.

One process a device, on CUDA over NCCL, elsewhere over gloo::

    torchrun --nproc-per-node 2 examples/benchmarks/collectives.py
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 examples/benchmarks/collectives.py            # PCIe without peers
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo torchrun ...                     # Ethernet
    torchrun --nproc-per-node 4 examples/benchmarks/collectives.py --device cpu --sizes-mib 0.5

Times are medians of interleaved rounds, by CUDA events or the host's clock; inputs are random, take turns, and are
larger together than the cache. Every result is compared with the exact one in the same run, and nothing is printed when
one is wrong. Where the GPUs map each other's memory, torch's symmetric-memory two-shot all-reduce is timed too. Kernels
are measured on CUDA only.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `examples` is not an installed package

from examples.benchmarks.timing import interleaved_medians
from lightning_taco import CodecConfig, _compat
from lightning_taco.bench.checks import MAX_ERROR
from lightning_taco.codec import FixedPoint, MessageLayout, TahQuant, decode, decode_sum, encode, requantize
from lightning_taco.collectives.algorithms import algorithms_of, exchange, overlaps
from lightning_taco.collectives.peer_memory import PeerMemory
from lightning_taco.collectives.traffic import Kind
from lightning_taco.config import BITS_PER_CODE
from lightning_taco.data_parallel.settings import weight_differences

CODECS = {
    "e4m3": CodecConfig(element="e4m3"),
    "taco": CodecConfig(element="e4m3", scale_mode="dual"),
    "int8": CodecConfig(element="int8"),
    "int6": CodecConfig(element="int6"),
    "int6g": CodecConfig(element="int6", levels="gaussian"),
    "int5g": CodecConfig(element="int5", levels="gaussian"),
    "int4": CodecConfig(element="int4"),
    "int4g": CodecConfig(element="int4", levels="gaussian"),
    "int4gs": CodecConfig(element="int4", levels="gaussian", rounding="stochastic"),
    "int3gs": CodecConfig(element="int3", levels="gaussian", rounding="stochastic"),
}
# Measured alone: weights' differences, and what goes between pipeline stages.
KERNELS_ONLY = {"weights": weight_differences()}
STAGES: dict[str, TahQuant | FixedPoint] = {
    "TAH-Quant": TahQuant(),
    "TAH-Quant, always rotated": TahQuant(rotation="always"),
    "fixed point, 8 bits": FixedPoint(bits=8),
    "fixed point, 6 bits": FixedPoint(bits=6),
}
ACTIVATION = (4, 2048, 4096)
TORCH_TWO_SHOT = "torch's symmetric-memory two-shot"
MEBI = 1 << 20
Key = tuple[str, str, str]
"""Kind, codec and algorithm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mib", type=float, nargs="+", default=[1, 4, 16, 64, 256], help="bf16 tensors, MiB")
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=["e4m3", "int8", "int6g", "int4gs"])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--no-kernels", action="store_true", help="measure collectives only")
    parser.add_argument("--algorithms", nargs="+", help="only these, such as two_shot; two_shot on two ranks as well")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = open_ranks(arguments.device)
    results: dict[str, list[dict[str, float | str]]] = {"kernels": [], "collectives": []}
    if not arguments.no_kernels and device.type == "cuda":
        codecs = {name: CODECS[name] for name in arguments.codecs} | KERNELS_ONLY
        results["kernels"] = [row for name in codecs for row in kernel_rows(name, codecs[name], arguments.rounds)]
        results["kernels"] += [row for name in STAGES for row in stage_rows(name, STAGES[name], arguments.rounds)]
    memory, reason = PeerMemory.open(dist.group.WORLD, device)
    if dist.get_rank() == 0 and memory is None:
        print(f"no mapped memory: {reason}")
    for size in arguments.sizes_mib:
        results["collectives"] += collective_rows(
            size, arguments.codecs, memory, arguments.rounds, device, arguments.algorithms
        )
    check(results["collectives"])
    if memory is not None:
        memory.close()
    if dist.get_rank() == 0:
        print_tables(results)
        if arguments.output:
            versions = {"torch": torch.__version__, "num_ranks": dist.get_world_size()}
            arguments.output.write_text(json.dumps({**versions, **results}, indent=1))
    dist.destroy_process_group()


def open_ranks(kind: str) -> torch.device:
    """Join the ranks that torchrun has started, each with random numbers of its own; this rank's device."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    # Ranks with the same values would make the same errors, which add up where others cancel.
    torch.manual_seed(dist.get_rank())
    return device


def kernel_rows(
    name: str, codec: CodecConfig, rounds: int, num_values: int = 32 * MEBI
) -> list[dict[str, float | str]]:
    """Encode, decode and requantise (two messages to one) of 64 MiB of bf16, and a copy of as many bytes."""
    inputs = [torch.randn(1, num_values, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    messages = [encode(values, codec) for values in inputs]
    pairs = [
        torch.cat([encode(values, codec), message]) for values, message in zip(inputs, messages[::-1], strict=True)
    ]
    target, message, values = torch.empty_like(inputs[0]), torch.empty_like(messages[0]), torch.empty_like(inputs[0])
    layout = MessageLayout.of(num_values, codec)
    moved = {
        "copy": 4 * num_values,
        "encode": 2 * num_values + layout.message_bytes,
        "decode": 2 * num_values + layout.message_bytes,
        "requantize": 3 * layout.message_bytes,
        "decode_sum": 2 * num_values + 2 * layout.message_bytes,
    }
    calls: dict[str, Callable[[int], Tensor]] = {
        "copy": lambda i: target.copy_(inputs[i]),
        "encode": lambda i: encode(inputs[i], codec, out=message),
        "decode": lambda i: decode(messages[i], codec, num_values, torch.bfloat16, out=values),
        "requantize": lambda i: requantize(pairs[i], codec, num_values, out=message),
        "decode_sum": lambda i: decode_sum(pairs[i], codec, num_values, torch.bfloat16, out=values.view(-1)),
    }
    times = interleaved_medians(calls, rounds, inputs[0].device, num_inputs=4, queued=True)
    copy_rate = moved["copy"] / times["copy"]
    return [
        {"codec": name, "kernel": key, "us": time, "share_of_copy": moved[key] / time / copy_rate}
        for key, time in times.items()
    ]


def stage_rows(name: str, codec: TahQuant | FixedPoint, rounds: int) -> list[dict[str, float | str]]:
    """Encode and decode of an activation of 64 MiB of bf16, all launches of each, and a copy of as many bytes."""
    inputs = [torch.randn(ACTIVATION, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    messages, target = [codec.encode(values) for values in inputs], torch.empty_like(inputs[0])
    calls: dict[str, Callable[[int], object]] = {
        "copy": lambda i: target.copy_(inputs[i]),
        "encode": lambda i: codec.encode(inputs[i]),
        "decode": lambda i: codec.decode(messages[i], ACTIVATION, torch.bfloat16),
    }
    moved = {name: inputs[0].nbytes + messages[0].nbytes for name in ("encode", "decode")}
    moved["copy"] = 2 * inputs[0].nbytes
    times = interleaved_medians(calls, rounds, inputs[0].device, num_inputs=4, queued=True)
    copy_rate = moved["copy"] / times["copy"]
    return [
        {"codec": name, "kernel": key, "us": time, "share_of_copy": moved[key] / time / copy_rate}
        for key, time in times.items()
    ]


def collective_rows(
    size_mib: float,
    codecs: list[str],
    memory: PeerMemory | None,
    rounds: int,
    device: torch.device,
    algorithms: list[str] | None = None,
) -> list[dict[str, float | str]]:
    """Each collective, the library's and ours by every algorithm, on a bf16 tensor of `size_mib`.

    Args:
        size_mib: a multiple of 8 KiB (a token) for each rank.
        codecs: names of `CODECS`.
        memory: that GPUs map, if they do.
        rounds: interleaved.
        device: this rank's.
        algorithms: only these; ``None`` for all that there are.

    Raises:
        ValueError: for a size that the ranks do not share evenly.
    """
    group, world_size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    hidden = 4096
    tokens = round(size_mib * MEBI) // 2 // hidden
    if tokens == 0 or tokens % world_size:
        raise ValueError(f"{size_mib} MiB are {tokens} tokens, which {world_size} ranks do not share evenly.")
    num_inputs = int(max(2, min(6, 512 // size_mib)))
    inputs = [torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device) for _ in range(num_inputs)]
    shards = [values.chunk(world_size)[dist.get_rank()].contiguous() for values in inputs]
    scattered, gathered = torch.empty_like(shards[0]), torch.empty_like(inputs[0])
    given: dict[Kind, list[Tensor]] = {"all_reduce": inputs, "reduce_scatter": inputs, "all_gather": shards}
    stock: dict[Kind, Callable[[int], Tensor]] = {
        "all_reduce": lambda i: _in_place_all_reduce(inputs[i].clone()),
        "reduce_scatter": lambda i: _out(_compat.reduce_scatter_single, scattered, inputs[i]),
        "all_gather": lambda i: _out(_compat.all_gather_single, gathered, shards[i]),
    }
    calls: dict[Key, Callable[[int], Tensor]] = {(kind, "stock", ""): run for kind, run in stock.items()}
    if memory is not None:
        calls["all_reduce", TORCH_TWO_SHOT, ""] = _torch_two_shot(inputs)
    for kind, tensors in given.items():
        for name in codecs:
            offered = algorithms_of(kind, world_size, overlaps=overlaps(group), has_peer_memory=memory is not None)
            for way in asked_of(kind, offered, algorithms):
                more = {"algorithm": way, "memory": memory}
                calls[kind, name, way] = lambda i, kind=kind, tensors=tensors, codec=CODECS[name], more=more: exchange(
                    kind, tensors[i], codec, group, **more
                )
    exact = {kind: _exact(kind, tensors[0]) for kind, tensors in given.items()}
    errors = {key: _relative_error(run(0), exact[key[0]]) for key, run in calls.items()}
    del exact
    clone: dict[Key, Callable[[int], Tensor]] = {("", "clone", ""): lambda i: inputs[i].clone()}
    times = interleaved_medians({**clone, **calls}, rounds, inputs[0].device, num_inputs=num_inputs)
    rows = []
    for key in errors:
        kind, name, way = key
        # In place: given a copy, whose time is taken off again.
        baseline = times[kind, "stock", ""] - (times["", "clone", ""] if kind == "all_reduce" else 0)
        own = times[key] - (times["", "clone", ""] if name == TORCH_TWO_SHOT else 0)
        row = {"kind": kind, "codec": name, "algorithm": way, "MiB": size_mib, "stock_us": baseline, "us": own}
        if name != "stock":
            rows.append({**row, "speedup": baseline / own, "relative_error": errors[key]})
    return rows


def asked_of(kind: Kind, offered: tuple[str, ...], algorithms: list[str] | None) -> list[str]:
    """The algorithms of `offered` that are asked for.

    >>> asked_of("all_reduce", ("one_shot",), ["two_shot", "all_gather"]), asked_of("all_gather", ("all_gather",), None)
    (['two_shot'], ['all_gather'])
    """
    if algorithms is None:
        return list(offered)
    # Two ranks never choose a two-shot, but its error there is what more ranks are compared with.
    return [way for way in algorithms if way in offered or (kind, way) == ("all_reduce", "two_shot")]


def check(rows: list[dict[str, float | str]]) -> None:
    """Refuse to go on with a wrong result: the library's own differ by the rounding of bf16 at most."""
    for row in rows:
        codec = CODECS.get(str(row["codec"]))
        limit = 0.01 if codec is None else MAX_ERROR[BITS_PER_CODE[codec.element]]
        if not float(row["relative_error"]) <= limit:
            raise SystemExit(f"wrong result, nothing is shown: {row}")


def print_tables(results: dict[str, list[dict[str, float | str]]]) -> None:
    for name, rows in results.items():
        if rows:
            print(f"\n{name}")
            print("  ".join(f"{column:>14}" for column in rows[0]))
        for row in rows:
            print("  ".join(f"{cell:>14.4g}" if isinstance(cell, float) else f"{cell!s:>14}" for cell in row.values()))


def _in_place_all_reduce(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


def _out(collective: Callable[[Tensor, Tensor], object], out: Tensor, values: Tensor) -> Tensor:
    collective(out, values)
    return out


def _exact(kind: Kind, tensor: Tensor) -> Tensor:
    """In fp32: the library's sums of bf16 are rounded at each step of a ring, more often with more ranks."""
    if kind == "all_gather":
        gathered = tensor.new_empty(tensor.shape[0] * dist.get_world_size(), *tensor.shape[1:])
        return _out(_compat.all_gather_single, gathered, tensor)
    total = _in_place_all_reduce(tensor.float())
    return total if kind == "all_reduce" else total.chunk(dist.get_world_size())[dist.get_rank()]


def _torch_two_shot(inputs: list[Tensor]) -> Callable[[int], Tensor]:
    assert dist.group.WORLD is not None
    buffer, _ = _compat.symmetric_memory(inputs[0].numel() * 2, inputs[0].device, dist.group.WORLD)
    shared = buffer.view(torch.bfloat16).view(inputs[0].shape)

    def run(index: int) -> Tensor:
        shared.copy_(inputs[index])
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", dist.group.WORLD.group_name)

    return run


def _relative_error(result: Tensor, exact: Tensor) -> float:
    return ((result.float() - exact.float()).norm() / exact.float().norm()).item()


if __name__ == "__main__":
    main()
