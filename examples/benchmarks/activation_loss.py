"""Loss of a language model with stored activations, against stock autograd on the same batches.

A tiny LLaMA on a CPU, or a GPT of 350M parameters on a GPU, in bf16 by autocast over weights in fp32::

    python examples/benchmarks/activation_loss.py --steps 2000 --output activation_loss.json
    python examples/benchmarks/activation_loss.py --preset 350M --device cuda --steps 200 \\
        --branches stock stock#2 fp4 everywhere

Every branch starts from the same weights and reads the same batches, so losses are compared step by step. ``stock#2``
is stock autograd from weights moved by one part in a million: what two runs differ by anyway. ``everywhere`` stores all
that the model saves in 4 bits, attention's query, key and value included; not its parameters, what is one value a token
and head or less, nor what the loss saves.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `examples` is not an installed package

from examples.gpt import GPT, GPTConfig
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
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "batch_size": 8,
        "sequence_length": 128,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 512,
        "lr": 2e-3,
        "max_bytes": 4_000_000,
    },
    "350M": {
        "batch_size": 8,
        "sequence_length": 1024,
        "hidden_size": 1024,
        "num_layers": 24,
        "num_heads": 16,
        "vocab_size": 8192,
        "lr": 3e-4,
        "max_bytes": 64_000_000,
    },
}
"""``tiny`` is a LLaMA, ``350M`` a GPT."""


class Everywhere:
    """Saved-tensor hooks that store every floating-point tensor but parameters in FP4.

    Args:
        min_numel: smaller tensors are statistics, such as attention's log-sum for each token and head, and are kept.
    """

    codec = ActivationConfig().codec

    def __init__(self, min_numel: int) -> None:
        self.min_numel = min_numel

    def pack(self, tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or _compat.is_parameter(tensor) or tensor.numel() < self.min_numel:
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
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS), help="sizes, which the following replace")
    for name in ("batch-size", "sequence-length", "hidden-size", "num-layers", "vocab-size", "max-bytes"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--files", nargs="*", help="glob patterns; default: Python's standard library")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--output", type=Path, help="write all losses here, as JSON")
    arguments = with_preset(parser.parse_args())
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda was given, but torch finds no CUDA device; leave it out to run on the CPU.")
    torch.manual_seed(0)
    data = TextDataModule(
        files=arguments.files,
        vocab_size=arguments.vocab_size,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        max_bytes=arguments.max_bytes,
    )
    data.prepare_data()
    data.setup()
    inputs = batches(data, arguments.steps, arguments.device)
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.branches:
        results[name] = train(name, inputs, data, arguments)
        if arguments.output:  # after each: they take minutes
            arguments.output.write_text(json.dumps({"torch": torch.__version__, **results}))
    print_table(results)


def with_preset(arguments: argparse.Namespace) -> argparse.Namespace:
    """What has not been given is the preset's."""
    for name, value in PRESETS[arguments.preset].items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, value)
    if arguments.precision is None:
        arguments.precision = "bf16" if arguments.device.type == "cuda" else "fp32"
    return arguments


def make_model(arguments: argparse.Namespace) -> nn.Module:
    """The same weights for every branch."""
    sizes = ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size")
    shared = {name: getattr(arguments, name) for name in sizes}
    with torch.device("cpu"):  # whose random numbers are the same everywhere
        if arguments.preset != "tiny":
            return GPT(GPTConfig(**shared), seed=1).to(arguments.device)
        config = LlamaConfig(**shared, num_kv_heads=shared["num_heads"] // 2, ffn_size=3 * shared["hidden_size"])
        return Llama(config, seed=1).to(arguments.device)


def train(
    name: str, inputs: list[tuple[Tensor, Tensor]], data: TextDataModule, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The losses of one branch."""
    model = make_model(arguments)
    if name == "stock#2":
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
                weight.mul_(1 + 1e-6 * noise.to(weight.device))
    settings = BRANCHES[name]
    handle = None if settings is None else store_in_few_bits(model, settings)
    num_values = arguments.batch_size * arguments.sequence_length * arguments.hidden_size
    everywhere = Everywhere(num_values // 4) if name == "everywhere" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses, start = [], time.perf_counter()
    for step, (tokens, targets) in enumerate(inputs):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * lr_fraction(step, arguments.steps // 20, arguments.steps)
        with autocast(arguments):
            with everywhere.scope() if everywhere else nullcontext():
                logits = model(tokens)
            loss = next_token_loss(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # read at the end: the host runs ahead of the device
    values = torch.stack(losses).tolist()
    seconds = time.perf_counter() - start
    ratio = None if handle is None else handle.ledger.total.ratio
    if handle is not None:
        handle.remove()
    print(f"{name}: {seconds:.0f} s, last loss {values[-1]:.4f}", flush=True)
    return {
        "losses": values,
        "validation_loss": validate(model, data, arguments),
        "seconds": seconds,
        "ratio": ratio,
    }


def autocast(arguments: argparse.Namespace) -> AbstractContextManager[Any]:
    """In bf16, if that is the precision."""
    return torch.autocast(arguments.device.type, torch.bfloat16, enabled=arguments.precision == "bf16")


def batches(data: TextDataModule, num_steps: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """The same for every branch, on the device before they are asked for: 16 bytes a token."""
    torch.manual_seed(3)
    found: list[tuple[Tensor, Tensor]] = []
    while len(found) < num_steps:
        for tokens, targets in itertools.islice(data.train_dataloader(), num_steps - len(found)):
            found.append((tokens.to(device), targets.to(device)))
    return found


@torch.no_grad()
def validate(model: nn.Module, data: TextDataModule, arguments: argparse.Namespace) -> float:
    losses = []
    for tokens, targets in itertools.islice(data.val_dataloader(), VALIDATION_BATCHES):
        with autocast(arguments):
            losses.append(next_token_loss(model(tokens.to(arguments.device)), targets.to(arguments.device)))
    return torch.stack(losses).mean().item()


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
