"""Train a tiny GPT on two tensor-parallel CPU ranks with the Trainer: `python examples/train_trainer.py`.

The strategy is the only line that differs from any other Trainer script:

    python examples/train_trainer.py --compression none         # the uncompressed twin
    python examples/train_trainer.py --model llama --sequence_parallel
    python examples/train_trainer.py --accelerator cuda --preset 350M --sequence_length 2048 --min_bytes 1048576
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything

from lightning_taco import TacoTPStrategy
from lightning_taco.config import resolve_compression

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `examples` is not an installed package

from examples.language_module import LanguageModule
from examples.text_data import TextDataModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "llama"], default="gpt")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument(
        "--compression", default="default", help="a recipe: default, taco, int8, balanced, smallest or none"
    )
    parser.add_argument("--min_bytes", type=int, default=16384, help="smaller tensors are sent as they are")
    parser.add_argument("--sequence_parallel", action="store_true")
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

    seed_everything(0)
    model = LanguageModule(
        model=args.model,
        preset=args.preset,
        vocab_size=args.vocab_size,
        sequence_length=args.sequence_length,
        sequence_parallel=args.sequence_parallel,
        lr=args.lr,
        warmup_steps=args.max_steps // 10,
    )
    data = TextDataModule(
        files=args.files,
        vocab_size=args.vocab_size,
        sequence_length=args.sequence_length,
        batch_size=args.batch_size,
        max_bytes=4_000_000 if args.files is None else None,
    )
    compression = resolve_compression(args.compression)
    if compression is not None:
        compression = replace(compression, min_bytes=args.min_bytes)
    trainer = Trainer(
        strategy=TacoTPStrategy(
            tensor_parallel_size=args.tensor_parallel_size,
            data_parallel_size=args.data_parallel_size,
            compression=compression,
        ),
        accelerator=args.accelerator,
        devices=args.tensor_parallel_size * args.data_parallel_size,
        precision=args.precision,
        max_steps=args.max_steps,
        limit_val_batches=20,
        log_every_n_steps=10,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(model, data)
    trainer.validate(model, data)


if __name__ == "__main__":
    main()
