"""Train a tiny GPT on two tensor-parallel CPU ranks with Fabric: `python examples/train_fabric.py`.

The strategy and the function that splits the model are all there is to tensor parallelism here; use `--compression
none` for the uncompressed twin, `--accelerator cuda` for GPUs.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from torch.distributed.device_mesh import DeviceMesh

from lightning_taco.config import resolve_compression
from lightning_taco.fabric import TacoTPStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `examples` is not an installed package

from examples.gpt import GPT, GPTConfig, parallelize
from examples.language_module import lr_fraction
from examples.plans import next_token_loss, shard_data_parallel
from examples.text_data import TextDataModule


def parallelize_fn(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split the model over the tensor-parallel axis, then over the data-parallel one where there is one."""
    parallelize(model, mesh["tensor_parallel"], sequence_parallel=False)
    data_parallel = mesh["data_parallel"]
    return shard_data_parallel(model, data_parallel) if data_parallel.size() > 1 else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument(
        "--compression", default="default", help="a recipe: default, taco, int8, balanced, smallest or none"
    )
    parser.add_argument("--min_bytes", type=int, default=16384, help="smaller tensors are sent as they are")
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--data_parallel_size", type=int, default=1)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--files", nargs="*", help="glob patterns; default: Python's standard library")
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--sequence_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    compression = resolve_compression(args.compression)
    if compression is not None:
        compression = replace(compression, min_bytes=args.min_bytes)
    strategy = TacoTPStrategy(
        parallelize_fn,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        compression=compression,
    )
    num_devices = args.tensor_parallel_size * args.data_parallel_size
    fabric = Fabric(strategy=strategy, accelerator=args.accelerator, devices=num_devices, precision=args.precision)
    fabric.launch()
    seed_everything(0)

    sizes = {"vocab_size": args.vocab_size, "sequence_length": args.sequence_length}
    max_bytes = 4_000_000 if args.files is None else None
    data = TextDataModule(args.files, batch_size=args.batch_size, max_bytes=max_bytes, **sizes)
    with fabric.rank_zero_first(local=True):
        data.prepare_data()
    data.setup()
    batches = fabric.setup_dataloaders(data.train_dataloader())

    model = fabric.setup_module(GPT(GPTConfig.preset(args.preset, **sizes)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1))
    warmup_steps = max(1, args.max_steps // 10)
    started = time.perf_counter()
    for step, (inputs, targets) in zip(range(args.max_steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * lr_fraction(step, warmup_steps, args.max_steps)
        loss = next_token_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.max_steps - 1:
            fabric.print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.0f} s")
    strategy.print_end_table()


if __name__ == "__main__":
    main()
