"""What the Trainer's and Fabric's strategy share: stored activations, from settings to table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import nn

from lightning_taco.activations import ActivationConfig, Ledger, StoredActivations, store_in_few_bits
from lightning_taco.strategies import report


class Activations:
    """The stored activations of the modules that one strategy sets up.

    Args:
        config: the settings, or ``None`` for stock autograd: then every method is a no-op and nothing is hooked.

    Attributes:
        handles: of the modules, while the strategy runs.
        ledger: what the last forward in training stored, by module and kind; stays readable after `stop`.
    """

    def __init__(self, config: ActivationConfig | None) -> None:
        self.config = config
        self.handles: list[StoredActivations] = []
        self.ledger = Ledger()
        self._is_first_step_reported = False

    def start(self, module: nn.Module) -> None:
        """Store the activations of `module` from now on. A strategy that sets up several calls it for each.

        Raises:
            RuntimeError: for a compiled module.
        """
        if self.config is None:
            return
        self.handles.append(store_in_few_bits(module, self.config))
        self._is_first_step_reported = False
        rank_zero_info(
            f"lightning_taco: activations: stored as {self.config}, from {self.config.min_numel} values up; "
            "attention's query, key and value as they are"
        )

    def stop(self) -> None:
        """Remove every hook; the ledger stays readable."""
        self._keep_ledger()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around a training step that runs the modules' parts without calling the modules themselves."""
        with ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.scope())
            yield

    def report_first_step(self) -> None:
        """Say once what the first forward has stored, or warn that it was nothing. Called before its backward."""
        if not self.handles or self._is_first_step_reported:
            return
        self._is_first_step_reported = True
        self._keep_ledger()
        total = self.ledger.total
        if not any(row.stored_bytes < row.stock_bytes for row in self.ledger.rows.values()):
            least = self.handles[0].config.min_numel
            rank_zero_warn(
                "lightning_taco stored no activation in few bits in the first step: no norm, activation or linear "
                f"layer of torch had an input of {least} values (min_numel) in half precision or fp32, outside of "
                "activation checkpointing and excluded modules."
            )
            return
        rank_zero_info(
            f"lightning_taco: first step: {total.num_tensors} saved tensors, {report.format_bytes(total.stock_bytes)}, "
            f"stored in {report.format_bytes(total.stored_bytes)} ({total.ratio:.2f}x)"
        )

    @rank_zero_only
    def print_table(self) -> None:
        """Print what the last forward stored, on rank 0; nothing if that was nothing."""
        self._keep_ledger()
        if self.ledger.rows:
            report.print_stored_table(self.ledger)

    def _keep_ledger(self) -> None:
        if not self.handles:
            return
        self.ledger = Ledger()
        for handle in self.handles:
            self.ledger.rows.update(handle.ledger.rows)
