"""``lightning-taco fit|validate|test|predict|study``: LightningCLI, with the current directory's classes importable."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

import lightning_taco  # noqa: F401  registers the short name of the strategy
from lightning_taco.study import StudyTrainer, check_studiable


class TacoCLI(LightningCLI):
    """LightningCLI with the subcommand ``study``.

    It also says how a strategy is to be written, where LightningCLI would only call its name unknown.
    """

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        """Names of the Trainer's methods that are subcommands, and their arguments that are no options."""
        subcommands = LightningCLI.subcommands()
        return subcommands | {"study": set(subcommands["fit"])}

    @override
    def before_instantiate_classes(self) -> None:
        """Refuse a class path that stands where a registered name belongs."""
        settings = self.config if self.subcommand is None else self.config[self.subcommand]
        strategy = settings.trainer.strategy
        if isinstance(strategy, str) and "." in strategy:
            self.parser.error(
                f"trainer.strategy={strategy} is a class path, but a bare string can only be a registered name such as "
                f"taco_tp; write trainer.strategy.class_path={strategy}, and its arguments below "
                "trainer.strategy.init_args."
            )

    def before_study(self) -> None:
        """Refuse a training that cannot be studied, in a sentence; LightningCLI calls this before `study`."""
        try:
            check_studiable(self.trainer)
        except (TypeError, ValueError) as error:
            self.parser.error(str(error))


def build_cli(args: Sequence[str] | None = None, *, run: bool = True) -> TacoCLI:
    """Parse `args` (those of the process by default) and, with ``run=True``, run the subcommand that they name.

    With ``run=False`` there is no subcommand: `args` are a subcommand's options, and the objects are only built.

    Raises:
        SystemExit: for options that cannot be parsed; what is wrong with them is on stderr.
    """
    _make_current_directory_importable()
    # No classes: model and data are given by class path, and a model that has its own dataloaders needs no data.
    return TacoCLI(
        trainer_class=StudyTrainer,
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
