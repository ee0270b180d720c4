"""``lightning-taco fit|validate|test|predict|study``: LightningCLI, with the current directory's classes importable.

``lightning-taco report`` makes a page of what a run has logged, ``lightning-taco bench`` times exchanges; they build no
Trainer and have parsers of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

import lightning_taco  # noqa: F401  registers the short name of the strategy
from lightning_taco.bench import bench
from lightning_taco.callbacks.run_logger import RunLogger
from lightning_taco.report import report
from lightning_taco.study import StudyTrainer, check_studiable

MORE_HELP = (
    "`lightning-taco report RUN_DIR` makes a page of what a run has logged; `lightning-taco bench` times exchanges and "
    "says from which size on compressing pays. `lightning-taco report --help` and `lightning-taco bench --help` list "
    "their options."
)
OTHERS = {"report": report, "bench": bench}
"""Subcommands that are none of LightningCLI."""


class TacoCLI(LightningCLI):
    """LightningCLI with the subcommand ``study``, whose ``fit`` leaves a log for ``lightning-taco report``.

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

    def before_fit(self) -> None:
        """Add a `RunLogger` that writes beside the first logger; LightningCLI calls this before `fit`.

        With ``logger: false``, which asks for no logs, and where the user has one already, nothing is added.
        """
        loggers = self.trainer.loggers
        if loggers and not any(isinstance(logger, RunLogger) for logger in loggers):
            self.trainer.loggers = [*loggers, RunLogger.beside(loggers[0], self.trainer.default_root_dir)]

    def before_study(self) -> None:
        """Refuse a training that cannot be studied, in a sentence; LightningCLI calls this before `study`."""
        try:
            check_studiable(self.trainer)
        except (TypeError, ValueError) as error:
            self.parser.error(str(error))


def build_cli(args: Sequence[str] | None = None, *, run: bool = True) -> TacoCLI:
    """Parse `args` (those of the process by default) and, with ``run=True``, run the subcommand that they name.

    With ``run=False`` there is no subcommand: `args` are a subcommand's options, and the objects are only built.
    ``report`` and ``bench`` are none of these subcommands; see `main`.

    Raises:
        SystemExit: for options that cannot be parsed; what is wrong with them is on stderr.
    """
    _make_current_directory_importable()
    # No classes: model and data are given by class path, and a model that has its own dataloaders needs no data.
    return TacoCLI(
        trainer_class=StudyTrainer,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"epilog": MORE_HELP},
        args=list(args) if args is not None else None,
        run=run,
    )


def main() -> None:
    """Entry point of the console script.

    Raises:
        SystemExit: with status 2, for options that cannot be parsed and for a run that cannot be shown; with 1, for a
            bench that found a wrong result.
    """
    other = OTHERS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if other is not None:
        other(sys.argv[2:])
    else:
        build_cli()


def _make_current_directory_importable() -> None:
    """As for ``python script.py``: a console script has its own folder on the path instead."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


if __name__ == "__main__":
    main()
