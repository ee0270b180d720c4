"""Loss of a tiny LLaMA with stored activations, against stock autograd on the same batches, on a CPU.

    python examples/benchmarks/activation_loss.py --steps 2000 --output activation_loss.json

Every branch starts from the same weights and reads the same batches, so losses are compared step by step. ``stock#2``
is stock autograd from weights moved by one part in a million: what two runs differ by anyway. ``everywhere`` stores all
that autograd saves in 4 bits, attention's query, key and value included.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `examples` is not an installed package

from examples.language_module import lr_fraction
from examples.llama import Llama, LlamaConfig
from examples.plans import next_token_loss
from examples.text_data import TextDataModule
from lightning_taco import _compat
from lightning_taco.activations import ActivationConfig, store_in_few_bits
from lightning_taco.codec import decode, encode

BRANCHES: dict[str, ActivationConfig | None] = {
    "stock": None,
    "stock#2": None,
    "fp4": ActivationConfig(min_numel=0),
    "nf4": ActivationConfig(element="nf4", min_numel=0),
    "int4 rotated gaussian": ActivationConfig(element="int4", rotation=True, levels="gaussian", min_numel=0),
    "int6": ActivationConfig(element="int6", min_numel=0),
    "everywhere": None,
}
VALIDATION_BATCHES = 20


class Everywhere:
    """Saved-tensor hooks that store every floating-point tensor but parameters in FP4."""

    codec = ActivationConfig().codec

    def pack(self, tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or _compat.is_parameter(tensor) or tensor.shape[-1:] == (1,):
            return tensor.detach()
        return encode(tensor.detach().reshape(1, -1), self.codec), tensor.shape, tensor.dtype

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        message, shape, dtype = packed
        return decode(message, self.codec, shape.numel(), dtype).view(shape)

    def scope(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--branches", nargs="+", default=list(BRANCHES), choices=list(BRANCHES))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--files", nargs="*", help="glob patterns; default: Python's standard library")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, help="write all losses here, as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    data = TextDataModule(
        files=arguments.files,
        vocab_size=512,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        max_bytes=4_000_000,
    )
    data.prepare_data()
    data.setup()
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.branches:
        results[name] = train(name, data, arguments)
        if arguments.output:  # after each: they take minutes
            arguments.output.write_text(json.dumps({"torch": torch.__version__, **results}))
    print_table(results)


def train(name: str, data: TextDataModule, arguments: argparse.Namespace) -> dict[str, Any]:
    """The losses of one branch."""
    config = LlamaConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=3 * arguments.hidden_size,
        sequence_length=arguments.sequence_length,
        vocab_size=512,
    )
    model = Llama(config, seed=1)
    if name == "stock#2":
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    settings = BRANCHES[name]
    handle = None if settings is None else store_in_few_bits(model, settings)
    everywhere = Everywhere() if name == "everywhere" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses, start = [], time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(data, arguments.steps)):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * lr_fraction(step, arguments.steps // 20, arguments.steps)
        with everywhere.scope() if everywhere else nullcontext():
            loss = next_token_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    ratio = None if handle is None else handle.ledger.total.ratio
    if handle is not None:
        handle.remove()
    print(f"{name}: {seconds:.0f} s, last loss {losses[-1]:.4f}", flush=True)
    return {"losses": losses, "validation_loss": validate(model, data), "seconds": seconds, "ratio": ratio}


def batches(data: TextDataModule, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same for every branch."""
    torch.manual_seed(3)
    num_left = num_steps
    while num_left:
        for batch in data.train_dataloader():
            yield batch[0], batch[1]
            num_left -= 1
            if not num_left:
                return


@torch.no_grad()
def validate(model: Llama, data: TextDataModule) -> float:
    losses = []
    for number, (inputs, targets) in enumerate(data.val_dataloader()):
        if number == VALIDATION_BATCHES:
            break
        losses.append(next_token_loss(model(inputs), targets).item())
    return statistics.mean(losses)


def gap(losses: list[float], stock: list[float]) -> tuple[float, float]:
    """Mean and standard error of the relative difference over the last tenth of the steps, paired."""
    last = max(2, len(stock) // 10)
    ratios = [ours / truth - 1 for ours, truth in zip(losses[-last:], stock[-last:], strict=True)]
    return statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))


def print_table(results: dict[str, dict[str, Any]]) -> None:
    print(f"{'branch':>22} {'validation':>11} {'gap':>8} {'training gap':>13} {'(s.e.)':>8} {'stored':>7} {'s':>6}")
    stock = results.get("stock")
    for name, row in results.items():
        cells = f"{name:>22} {row['validation_loss']:11.4f}"
        if stock is not None:
            mean, error = gap(row["losses"], stock["losses"])
            cells += f" {row['validation_loss'] / stock['validation_loss'] - 1:+8.2%} {mean:+13.2%} {error:8.2%}"
        print(cells + f" {row['ratio'] or 1:6.1f}x {row['seconds']:6.0f}")


if __name__ == "__main__":
    main()
