"""Gradients in few bits against the library's own reduce-scatter, and what QuanGrad costs and saves.

One process a device; on CUDA over NCCL, elsewhere over gloo::

    torchrun --nproc-per-node 2 examples/benchmarks/data_parallel.py
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 examples/benchmarks/data_parallel.py         # PCIe without peers
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo torchrun ...                    # Ethernet
    torchrun --nproc-per-node 4 examples/benchmarks/data_parallel.py --size-mib 1 --model tiny --vocab-size 512  # CPU

Three tables:

* `reduce_scatter`: microseconds for as many gradients as fit in `--size-mib` of bf16. `fp32` and `bf16` are the
  library's on gradients of that dtype; `8 bits` and `4 bits` are single-level on bf16 gradients, and with four ranks or
  more `8 + 4 bits` takes half of the ranks as a node. Medians of interleaved rounds; errors against the fp64 sum.
* `accumulate`: the fused kernel that adds a micro-batch's gradient to one kept in 8 bits; its share of the bandwidth
  that a copy of as many bytes has.
* `memory`: what the gradients of a model take after `--micro-batches` backwards, in fp32 and quantised, and the peak on
  top of the weights. By the allocator on CUDA; elsewhere by the tensors that are there, and there is no peak.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `examples` is not an installed package

from examples.benchmarks.timing import interleaved_medians
from examples.llama import Llama, LlamaConfig
from lightning_taco import CodecConfig
from lightning_taco._compat import reduce_scatter_single
from lightning_taco.codec import MessageLayout, accumulate, encode
from lightning_taco.data_parallel import DataParallelTraffic, GradientExchange, make_node_groups
from lightning_taco.data_parallel.quan_grad import QuantizedGradients
from lightning_taco.data_parallel.settings import DataParallelConfig

PARTS = ("reduce_scatter", "accumulate", "memory")
MEBI = 1 << 20
Row = dict[str, float | str]
KEPT = {
    "e4m3": CodecConfig(element="e4m3", rotation=False),
    "e4m3 stochastic": CodecConfig(element="e4m3", rotation=False, rounding="stochastic"),
    "int8 stochastic": CodecConfig(element="int8", rotation=False, rounding="stochastic"),
    "rotated int8": CodecConfig(element="int8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=256, help="gradients, MiB in bf16")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--model", default="1B", help="preset of LLaMA whose gradients are kept: tiny, 1B or 8B")
    parser.add_argument("--vocab-size", type=int, help="of that model, in place of the preset's")
    parser.add_argument("--micro-batches", type=int, default=8, help="backwards before gradients are looked at")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="tables to make")
    arguments = parser.parse_args()
    sizes = {} if arguments.vocab_size is None else {"vocab_size": arguments.vocab_size}
    device, num_bytes, rounds = start(), arguments.size_mib * MEBI, arguments.rounds
    makers: dict[str, Callable[[], list[Row]]] = {
        "reduce_scatter": lambda: reduce_scatter_rows(num_bytes, rounds, device),
        "accumulate": lambda: accumulate_rows(num_bytes, rounds, device),
        "memory": lambda: memory_rows(LlamaConfig.preset(arguments.model, **sizes), arguments.micro_batches, device),
    }
    results = {part: makers[part]() for part in arguments.parts}
    if dist.get_rank() == 0:
        print_tables(results)
        if arguments.output:
            arguments.output.write_text(json.dumps({"torch": torch.__version__, **results}, indent=1))
    dist.destroy_process_group()


def start() -> torch.device:
    """The process group and this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def exchanges() -> dict[str, GradientExchange]:
    """By name, over all ranks."""
    config, world_size = DataParallelConfig(), dist.get_world_size()
    node_sizes = {"8 bits": world_size, "4 bits": 1}
    if world_size >= 4 and world_size % 2 == 0:
        node_sizes["8 + 4 bits"] = world_size // 2
    codecs = (config.gradients_inside_node, config.gradients_between_nodes)
    return {
        name: GradientExchange(make_node_groups(dist.group.WORLD, size), *codecs, DataParallelTraffic())
        for name, size in node_sizes.items()
    }


def reduce_scatter_rows(num_bytes: int, rounds: int, device: torch.device) -> list[Row]:
    """The library's and ours, on the same gradients, which take `num_bytes` in bf16."""
    world_size = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    num_values = num_bytes // 2 // world_size
    num_inputs = max(1, min(4, 1024 * MEBI // num_bytes))
    inputs = [torch.randn(world_size, num_values, dtype=torch.bfloat16, device=device) for _ in range(num_inputs)]
    wide = inputs[0].float()
    out, wide_out = (torch.empty(num_values, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    calls: dict[str, Callable[[int], object]] = {
        "fp32": lambda i: reduce_scatter_single(wide_out, wide.view(-1)),
        "bf16": lambda i: reduce_scatter_single(out, inputs[i].view(-1)),
    }
    ours = exchanges()
    for name, exchange in ours.items():
        calls[name] = lambda i, exchange=exchange: exchange.reduce_scatter(inputs[i], out)
    exact = torch.empty(num_values, dtype=torch.float64, device=device)
    reduce_scatter_single(exact, inputs[0].double().view(-1))
    errors = {}
    for name, call in calls.items():
        call(0)
        result = wide_out if name == "fp32" else out
        errors[name] = ((result.double() - exact).norm() / exact.norm()).item()
    del exact
    times = interleaved_medians(calls, rounds, device, num_inputs=num_inputs)
    return [
        {
            "gradients": name,
            "us": time_us,
            "against fp32": times["fp32"] / time_us,
            "against bf16": times["bf16"] / time_us,
            "relative_error": errors[name],
        }
        for name, time_us in times.items()
    ]


def accumulate_rows(num_bytes: int, rounds: int, device: torch.device) -> list[Row]:
    """Each codec that gradients may be kept in, on bf16 gradients of `num_bytes`."""
    num_values = num_bytes // 2
    gradients = [torch.randn(num_values, dtype=torch.bfloat16, device=device) for _ in range(2)]
    target = torch.empty_like(gradients[0])
    messages = {name: encode(gradients[0].view(1, -1), codec) for name, codec in KEPT.items()}
    calls: dict[str, Callable[[int], object]] = {"copy": lambda i: target.copy_(gradients[i])}
    moved = {"copy": 4 * num_values}
    for name, codec in KEPT.items():
        calls[name] = lambda i, name=name, codec=codec: accumulate(messages[name], gradients[i], codec, seed=i)
        moved[name] = 2 * num_values + 2 * MessageLayout.of(num_values, codec).message_bytes
    times = interleaved_medians(calls, rounds, device, num_inputs=2, queued=True)
    rate = moved["copy"] / times["copy"]
    return [
        {
            "kept in": name,
            "us": time_us,
            "GB/s": moved[name] / time_us / 1e3,
            "share_of_copy": moved[name] / time_us / rate,
        }
        for name, time_us in times.items()
    ]


def memory_rows(config: LlamaConfig, micro_batches: int, device: torch.device) -> list[Row]:
    """Gradients of a model after some backwards, as they are in fp32 and kept in FP8 blocks."""
    rows: list[Row] = []
    for name, codec in (("fp32", None), ("e4m3", KEPT["e4m3 stochastic"])):
        with torch.device(device):
            model = Llama(config)
        kept = None if codec is None else QuantizedGradients(model.parameters(), codec, seed=0)
        before = allocated_bytes(model, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for step in range(micro_batches):
            tokens = torch.randint(0, 256, (1, 64), device=device, generator=torch.Generator(device).manual_seed(step))
            model(tokens).float().square().mean().backward()
        after = allocated_bytes(model, device)
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        num_values = sum(parameter.numel() for parameter in model.parameters())
        gradients = after - before
        rows.append(
            {
                "gradients": name,
                "parameters": float(num_values),
                "MiB": gradients / MEBI,
                "bits": 8 * gradients / num_values,
                "saved": 1 - gradients / (4 * num_values),
                "peak_MiB": peak / MEBI,
            }
        )
        if kept is not None:
            kept.detach()
        del model, kept
    return rows


def allocated_bytes(model: nn.Module, device: torch.device) -> int:
    """What is allocated; without an allocator that says so, the weights, gradients and messages that are there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    from lightning_taco.data_parallel.quantized_gradient import quantized_gradient

    total = 0
    for parameter in model.parameters():
        gradient = quantized_gradient(parameter)
        message = None if gradient is None else gradient._message
        tensors: tuple[Tensor | None, ...] = (parameter, parameter.grad, message)
        total += sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)
    return total


def print_tables(results: dict[str, list[Row]]) -> None:
    for name, rows in results.items():
        print(f"\n{name}")
        print("  ".join(f"{column:>16}" for column in rows[0]))
        for row in rows:
            print("  ".join(f"{cell:>16.4g}" if isinstance(cell, float) else f"{cell!s:>16}" for cell in row.values()))


if __name__ == "__main__":
    main()
