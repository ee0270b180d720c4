"""``lightning-taco fit|validate|test|predict``: LightningCLI, with class paths of the current directory importable."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_taco  # noqa: F401  registers the short name of the strategy


def build_cli(args: Sequence[str] | None = None, *, run: bool = True) -> LightningCLI:
    """Parse `args` (those of the process by default) and, with ``run=True``, run the subcommand that they name.

    With ``run=False`` there is no subcommand: `args` are a subcommand's options, and the objects are only built.
    """
    _make_current_directory_importable()
    return LightningCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=list(args) if args is not None else None,
        run=run,
    )


def main() -> None:
    """Entry point of the console script."""
    build_cli()


def _make_current_directory_importable() -> None:
    """As for ``python script.py``: a console script has its own folder on the path instead."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


if __name__ == "__main__":
    main()
