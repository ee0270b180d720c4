"""Stored activations against stock autograd and full recomputation: bytes, time, peak memory and the longest sequence.

On one GPU, for a layer of LLaMA-8B's shape at 8192 tokens, then for steps of a whole model::

    python examples/benchmarks/activations.py --output activations.json
    python examples/benchmarks/activations.py --parts longest --ways stock fp4 --optimizer adamw8bit
    torchrun --nproc-per-node 2 examples/benchmarks/activations.py --parts longest          # tensor parallelism
    python examples/benchmarks/activations.py --tiny                                        # on a CPU, a few seconds

``layer``: stored bytes by the allocator and as predicted, and time of forward and backward, medians of rounds in which
the ways take turns: of four in a row while the device is busy, and of one from idle. ``kernels``: what the tensors of a
SwiGLU go through, fused and not, beside a copy. ``weight_gradient``: of each linear layer's shape, from the message by
one kernel, and by decoding and the library's product. ``step``: peak memory and time of a training step. ``longest``:
the longest sequence whose step fits into the memory, to one part in sixteen; a guess by the memory of shorter ones
saves most of the search.
"""

import argparse
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `examples` is not an installed package

from examples.benchmarks.timing import interleaved_medians
from examples.llama import Llama, LlamaConfig, parallelize, rotary_table
from examples.plans import materialize, next_token_loss
from lightning_taco.activations import (
    ActivationConfig,
    BlockSizes,
    StoredActivations,
    StoredBytes,
    measure_stored,
    predict_block,
    store_in_few_bits,
)
from lightning_taco.activations.functions import Product, can_read_messages, gradients_at, silu_times
from lightning_taco.activations.storage import AutocastState, Quantized
from lightning_taco.codec.kernel_launch import INTERPRETED

WAYS: dict[str, ActivationConfig | None] = {
    "stock": None,
    "fp4": ActivationConfig(),
    "nf4": ActivationConfig(element="nf4"),
    "int4 rotated": ActivationConfig(element="int4", rotation=True, levels="gaussian"),
    "int8": ActivationConfig(element="int8"),
    "recompute": None,
}
COAT_SHARE = 16.5 / 28  # of stock bytes: FP8 storage, by the figures of AGoQ's paper
TINY = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 256, "vocab_size": 128}
OPTIMIZERS = ("adamw", "adamw8bit")
IN_A_ROW = 4  # layers that are timed as one
SPARE_BYTES = 1 << 30  # for what does not go through the allocator, such as NCCL's buffers
LARGEST_ERROR = 1e-2  # relative, of a gradient in bf16 whose sums are in another order
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--tokens", type=int, default=8192, help="sequence length of layer and step")
    parser.add_argument("--num-layers", type=int, default=32, help="of the model in step and longest")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--most-tokens", type=int, default=1 << 20, help="where the search for the longest ends")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="of step and longest")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    if arguments.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        parser.error(
            "--optimizer adamw8bit needs torchao, which is not installed: install 'torchao>=0.18', or use adamw."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() else 0)
    if not torch.cuda.is_available():
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # A rank that runs out of memory alone leaves the others waiting: not for long.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=3))
    sizes = LlamaConfig.preset("8B", vocab_size=arguments.vocab_size, num_layers=arguments.num_layers)
    if arguments.tiny:
        sizes = replace(sizes, **TINY, num_layers=2)
        arguments.tokens, arguments.most_tokens, arguments.rounds = 64, 128, 3
    results = {part: MEASURES[part](sizes, arguments, device) for part in arguments.parts}
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_tables(results)
        if arguments.output:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            arguments.output.write_text(json.dumps({"torch": torch.__version__, "device": name, **results}, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


def settings_of(way: str, arguments: argparse.Namespace) -> ActivationConfig | None:
    """At tiny sizes every tensor counts."""
    settings = WAYS[way]
    return replace(settings, min_numel=0) if settings is not None and arguments.tiny else settings


# One layer.


def layer_rows(sizes: LlamaConfig, arguments: argparse.Namespace, device: torch.device) -> Rows:
    """Each way with one layer: bytes by the allocator (on a CPU: of saved tensors), predicted bytes, and times."""
    tokens = arguments.tokens
    torch.manual_seed(0)
    x = torch.randn(1, tokens, sizes.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    rotary = rotary_table(tokens, sizes.head_size, sizes.rope_theta, device)
    rows: Rows = []
    calls: dict[str, Callable[[int], object]] = {}
    for way in arguments.ways:
        config = replace(sizes, num_layers=1, activation_checkpointing=way == "recompute")
        with torch.device(device):
            block = Llama(replace(config, vocab_size=8), seed=1).bfloat16().blocks[0]
        settings = settings_of(way, arguments)
        handle = None if settings is None else store_in_few_bits(block, settings)
        stored = stored_bytes(block, handle, partial(forward_of_own_input, block, x, rotary))
        predicted = predict_block(block_sizes(sizes, tokens), settings or ActivationConfig())
        total = sum(predicted.values(), StoredBytes())
        expected = {"recompute": x.nbytes, "stock": total.stock_bytes}.get(way, total.stored_bytes)
        rows.append({"way": way, "stored_bytes": stored, "predicted_bytes": expected})

        def step(index: int, block: Any = block) -> None:
            block(x, rotary).backward(gradient)

        calls[way] = step
    # In a model the device always has work queued. From idle, as it was measured at first, the time until the first
    # launch counts too, and it is longest where every function is intercepted.
    times = interleaved_medians(calls, arguments.rounds, device, num_inputs=IN_A_ROW, queued=True)
    from_idle = interleaved_medians(calls, arguments.rounds, device)
    stock = next((row["stored_bytes"] for row in rows if row["way"] == "stock"), None)
    for row in rows:
        row["stored_against_stock"] = row["stored_bytes"] / stock - 1 if stock else None
        for name, measured in (("", times), ("_from_idle", from_idle)):
            row[f"ms{name}"] = measured[row["way"]] / 1000
            row[f"time{name}_against_stock"] = (
                measured[row["way"]] / measured["stock"] - 1 if "stock" in measured else None
            )
    return rows


def forward_of_own_input(block: torch.nn.Module, x: Tensor, rotary: Tensor) -> Tensor:
    """In a model the block before makes the input. One that is there already would be free for whoever keeps it."""
    return block(x.clone(), rotary)


def block_sizes(sizes: LlamaConfig, tokens: int) -> BlockSizes:
    return BlockSizes(
        num_tokens=tokens,
        hidden_size=sizes.hidden_size,
        ffn_size=sizes.ffn_size,
        kv_size=sizes.num_kv_heads * sizes.head_size,
    )


def stored_bytes(model: torch.nn.Module, handle: StoredActivations | None, forward: Callable[[], Tensor]) -> int:
    """What one forward leaves for its backward, its result not counted."""
    if next(model.parameters()).device.type != "cuda":
        counted = store_in_few_bits(model, "agoq") if handle is None else handle
        total = measure_stored(counted, forward).ledger.total
        if handle is None:
            counted.remove()
        return total.stock_bytes if handle is None else total.stored_bytes
    forward()  # communicators and kernels
    before = torch.cuda.memory_allocated()
    output = forward()
    return torch.cuda.memory_allocated() - before - output.nbytes


# The kernels of a SwiGLU.


def kernel_rows(sizes: LlamaConfig, arguments: argparse.Namespace, device: torch.device) -> Rows:
    """Each format: encode, decode, and product and gradients from the messages, against decoded tensors."""
    shape = (arguments.tokens, sizes.ffn_size)
    gate, up, gradient, target = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    rows: Rows = []
    for way in arguments.ways:
        settings = WAYS[way]
        if settings is None:
            continue
        sources = [Quantized(values, settings.codec) for values in (gate, up)]
        calls: dict[str, Callable[[int], object]] = {
            "copy": lambda i: target.copy_(gate),
            "encode": lambda i, s=settings: Quantized(gate, s.codec),
            "decode": lambda i, s=sources: s[0].value(),
            "product": lambda i, s=sources: Product(silu_times, s, device).value(),
            "product, decoded": lambda i, s=sources: silu_times(s[0].value(), s[1].value()),
            "gradients": lambda i, s=sources: gradients(s, gradient),
            "gradients, decoded": lambda i, s=sources: decoded_gradients(s, gradient),
        }
        times = interleaved_medians(calls, arguments.rounds, device, queued=True)
        rows += [{"way": way, "kernel": name, "us": microseconds} for name, microseconds in times.items()]
    return rows


def gradients(sources: list[Quantized], gradient: Tensor) -> object:
    """As `SiluTimesOfMessages` computes them; on a CPU as `SiluTimes` does."""
    if not can_read_messages(gradient):
        return decoded_gradients(sources, gradient)
    from lightning_taco.activations import kernels

    gate, up = sources
    return kernels.silu_times_backward_triton(gate.message, up.message, gate.codec, gradient)


def decoded_gradients(sources: list[Quantized], gradient: Tensor) -> object:
    values = tuple(source.value() for source in sources)
    return gradients_at(silu_times, values, (True, True), gradient, AutocastState.of(gradient.device))


# Weights' gradients.


def weight_gradient_rows(sizes: LlamaConfig, arguments: argparse.Namespace, device: torch.device) -> Rows:
    """Each shape of a linear layer, and each format that a product can read: both ways, and how far they are apart.

    Raises:
        RuntimeError: they are further apart than rounding makes them.
    """
    rows: Rows = []
    for way in arguments.ways:
        settings = WAYS[way]
        if settings is not None and settings.has_readable_messages:
            for shape in linears(sizes):
                rows.append({"way": way, **weight_gradient_row(shape, settings, arguments, device)})
    return rows


def weight_gradient_row(
    shape: tuple[str, int, int, int], settings: ActivationConfig, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """One shape, as `linears` has it."""
    name, num_outputs, num_channels, num_readers = shape
    # Triton's interpreter has no products in bf16.
    kind = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
    source = Quantized(torch.randn(arguments.tokens, num_channels, **kind), settings.codec)
    gradient, value = torch.randn(arguments.tokens, num_outputs, **kind), source.value()
    can_run = can_read_messages(gradient) or INTERPRETED
    kernels = fused_calls(gradient, source, num_channels) if can_run else {}
    errors = [relative_error(call(0), gradient.t() @ value) for call in kernels.values()]
    if any(not error <= LARGEST_ERROR for error in errors):
        raise RuntimeError(f"gradient of {name}, {settings}: relative errors {errors} of the fused kernels")
    calls: dict[str, Callable[[int], object]] = {
        "product": lambda i: gradient.t() @ value,
        "decode": lambda i: source.value(),
        **kernels,
    }
    times = interleaved_medians(calls, arguments.rounds, device, queued=True)
    separate = times["product"] + times["decode"] / num_readers
    fused = min((times[each] for each in kernels), default=None)
    return {
        "linear": name,
        "readers": num_readers,
        "product_us": times["product"],
        "decode_us": times["decode"],
        "separate_us": separate,
        **{f"fused_us {number}": times[each] for number, each in enumerate(kernels)},
        "fused_against_separate": fused / separate - 1 if fused else None,
        "relative_error": max(errors, default=None),
    }


def linears(sizes: LlamaConfig) -> list[tuple[str, int, int, int]]:
    """Name, outputs, channels, and how many layers read the same input."""
    hidden, kv = sizes.hidden_size, sizes.num_kv_heads * sizes.head_size
    return [
        ("query", hidden, hidden, 3),
        ("key, value", kv, hidden, 3),
        ("output", hidden, hidden, 1),
        ("gate, up", sizes.ffn_size, hidden, 2),
        ("down", hidden, sizes.ffn_size, 1),
    ]


def fused_calls(gradient: Tensor, source: Quantized, num_channels: int) -> dict[str, Callable[[int], Tensor]]:
    """The kernel, with each tile."""
    from lightning_taco.activations.kernels_weight_gradient import TILES, weight_gradient_triton

    return {
        str(tile): lambda i, t=tile: weight_gradient_triton(gradient, source.message, source.codec, num_channels, t)
        for tile in TILES
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


# Whole models.


class Training:
    """A LLaMA with an optimizer whose state is in bf16 or 8 bits, and one way of storing; split over all ranks."""

    def __init__(self, way: str, sizes: LlamaConfig, arguments: argparse.Namespace, device: torch.device) -> None:
        config = replace(sizes, sequence_length=arguments.most_tokens, activation_checkpointing=way == "recompute")
        with torch.device("meta"):
            self.model = Llama(config).bfloat16()
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.ranks > 1:
            mesh = init_device_mesh(device.type, (self.ranks,), mesh_dim_names=("tensor_parallel",))
            parallelize(self.model, mesh, sequence_parallel=True, loss_parallel=True)
        materialize(self.model, device, 0)
        settings = settings_of(way, arguments)
        self.handle = None if settings is None else store_in_few_bits(self.model, settings)
        self.optimizer = make_optimizer(arguments.optimizer, self.model)
        self.device, self.vocab_size = device, config.vocab_size
        self.peaks: dict[int, int] = {}  # tokens -> bytes, of steps that fitted

    def step(self, num_tokens: int) -> None:
        """One step on random tokens."""
        torch.manual_seed(0)
        tokens = torch.randint(self.vocab_size, (1, num_tokens + 1), device=self.device)
        with loss_parallel():
            logits = self.model(tokens[:, :-1])
            logits = logits if isinstance(logits, DTensor) else logits.float()
            next_token_loss(logits, tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fits(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens fits on every rank."""
        succeeded, is_warm = True, bool(self.optimizer.state)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            self.step(num_tokens)
        except torch.OutOfMemoryError:
            succeeded = False
        self.forget()
        if succeeded and is_warm and self.device.type == "cuda":  # the first step makes the optimizer's state
            self.peaks[num_tokens] = torch.cuda.max_memory_reserved()
        return agreed_least(int(succeeded), self.device) == 1

    def forget(self) -> None:
        """Leave nothing of a step behind, wherever it failed."""
        self.optimizer.zero_grad()
        if self.handle is not None:
            self.handle.forget()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def expected(self) -> int | None:
        """How many tokens should fit, by the two longest that did: beyond the weights memory grows with them."""
        if self.device.type != "cuda":
            return None
        limit = memory_limit(self.device)
        known, found = sorted(self.peaks.items())[-2:], 0
        if len(known) == 2:
            (tokens, peak), (more_tokens, higher_peak) = known
            slope = (higher_peak - peak) / (more_tokens - tokens)
            found = int(more_tokens + max(0, limit - higher_peak) / slope) if slope > 0 else 0
        return agreed_least(found, self.device) or None


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """`name` is one of `OPTIMIZERS`; AdamW's state has the dtype of the weights."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-5)


def agreed_least(value: int, device: torch.device) -> int:
    """The least of all ranks, so that all go on with the same."""
    if not dist.is_initialized():
        return value
    least = torch.tensor(value, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def memory_limit(device: torch.device) -> int:
    """Bytes that the allocator of a rank may take: the same on all, so that they run out of them at the same place."""
    free, _ = torch.cuda.mem_get_info(device)
    return agreed_least(free + torch.cuda.memory_reserved(device), device) - SPARE_BYTES


def step_rows(sizes: LlamaConfig, arguments: argparse.Namespace, device: torch.device) -> Rows:
    """Peak memory and time of a step of the whole model, each way."""
    rows: Rows = []
    for way in arguments.ways:
        training = Training(way, sizes, arguments, device)
        training.step(arguments.tokens)  # the optimizer's state, and kernels
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        calls = {way: lambda index: training.step(arguments.tokens)}  # noqa: B023
        times = interleaved_medians(calls, 3, device)  # two models need not fit: no turns
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        rows.append({"way": way, "peak_bytes": peak, "ms": times[way] / 1000})
        release(training, device)
    stock = next((row for row in rows if row["way"] == "stock"), None)
    for row in rows:
        row["peak_against_stock"] = row["peak_bytes"] / stock["peak_bytes"] - 1 if stock and row["peak_bytes"] else None
        row["time_against_stock"] = row["ms"] / stock["ms"] - 1 if stock else None
    return rows


def longest_rows(sizes: LlamaConfig, arguments: argparse.Namespace, device: torch.device) -> Rows:
    """The longest sequence whose step fits, each way."""
    rows: Rows = []
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_limit(device) / total, device)
    for way in arguments.ways:
        training = Training(way, sizes, arguments, device)
        least = 64 if arguments.tiny else 2048
        found = longest(training.fits, arguments.most_tokens, least, training.expected)
        rows.append({"way": way, "optimizer": arguments.optimizer, "tokens": found})
        release(training, device)
    stock = next((row["tokens"] for row in rows if row["way"] == "stock"), None)
    for row in rows:
        row["against_stock"] = row["tokens"] / stock if stock else None
    return rows


def longest(
    fits: Callable[[int], bool], most: int, least: int, expected: Callable[[], int | None] = lambda: None
) -> int:
    """The most that fits, to a sixteenth; a multiple of `least`, 0 if none fits.

    Doubles while it fits, then halves the gap. As soon as there is an `expected`, a little less and a little more is
    tried first: where it is right these two end the search, without a try that is far too long.
    """
    good, bad, has_failed = 0, most // least * least + least, False
    guesses: list[int] | None = None
    while bad - good > max(least, good // 16):
        if guesses is None and (guess := expected()) is not None:
            guesses = [min(guess * part // 64 // least * least, bad - least) for part in (62, 65)]
        size = (good + bad) // 2 // least * least if has_failed else min(max(2 * good, least), bad - least)
        while guesses:
            if good < (guess := guesses.pop(0)) < bad:
                size = guess
                break
        if fits(size):
            good = size
        else:
            bad, has_failed = size, True
    return good


def release(training: Training, device: torch.device) -> None:
    if training.handle is not None:
        training.handle.remove()
    training.__dict__.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def print_tables(results: dict[str, Rows]) -> None:
    for part, rows in results.items():
        print(f"\n{part}")
        if rows:
            print("  ".join(f"{column:>20}" for column in rows[0]))
        for row in rows:
            cells = (f"{cell:>20.4g}" if isinstance(cell, float) else f"{cell!s:>20}" for cell in row.values())
            print("  ".join(cells))
    if "step" in results:
        print(f"\nFP8 storage as COAT has it: activations {COAT_SHARE:.0%} of stock's, by AGoQ's figures")


MEASURES: dict[str, Callable[[LlamaConfig, argparse.Namespace, torch.device], Rows]] = {
    "layer": layer_rows,
    "kernels": kernel_rows,
    "weight_gradient": weight_gradient_rows,
    "step": step_rows,
    "longest": longest_rows,
}

if __name__ == "__main__":
    main()
