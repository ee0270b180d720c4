"""`CompressionSchedule`: compression off in the first or last steps, or by other settings from some steps on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_taco.callbacks.events import Event
from lightning_taco.callbacks.host import Host, host_of
from lightning_taco.callbacks.hosted import HostedCallback
from lightning_taco.callbacks.sampling import checked_every_n_steps
from lightning_taco.config import RECIPE_NAMES, CompressionConfig, resolve_compression

OWNER = "schedule"
STRATEGY_SETTINGS = "the strategy's settings"

Settings = CompressionConfig | str | None


@dataclass(frozen=True)
class Phase:
    """What holds in a step.

    Attributes:
        suspended: why nothing is compressed; ``None`` if something is.
        name: of the settings, for the user and to tell a change; ``None`` where they are left as they were before.
        settings: a recipe or settings; ``None`` for the strategy's own.
    """

    suspended: str | None = None
    name: str | None = STRATEGY_SETTINGS
    settings: CompressionConfig | str | None = None


class CompressionSchedule(HostedCallback):
    """Switches compression off, on, or to other settings by the number of the step, on all ranks alike.

    What holds in a step depends on its number only, so it is right at once after a resume. Each change is one `Event`,
    to the log and to loggers that keep events; traffic counters show what was sent as it is, and why. Changes hold for
    whole steps: forward, recomputation and backward agree. With `CompressionGuard` beside it, an exchange is
    compressed when neither wants it as it is. With compression off in the strategy it does nothing.

    In a Fabric script, call ``attach(fabric)`` once after set-up and ``start_step(step)`` before the forward of each
    step, on all ranks; ``end_step`` does nothing.

    Args:
        uncompressed_first: steps at the start in which all is sent as it is: their number, or, as a float from 0.0 to
            1.0, their share of the run.
        uncompressed_last: the same at the end of the run.
        recipes: step to the name of the recipe that is used from it on, up to the next one; ``"none"`` sends all as it
            is. Before the first of them, the strategy's own settings hold. Of a recipe the codecs are used;
            `min_bytes`, `exclude` and the like stay the strategy's.
        by_step: in place of `recipes`, a function that takes the step and gives the name of a recipe, a
            `CompressionConfig`, which is used whole, or ``None`` to send all as it is. It is called before each step
            and must give the same on all ranks.
        total_steps: length of the run, which shares and `uncompressed_last` need; by default the Trainer's own.

    Raises:
        ValueError: for a number out of range or an unknown recipe; at the start, when the length of the run is needed
            and not known.
        TypeError: at set-up, when the strategy is not `TacoTPStrategy`.

    Cost: none but for the step of a change.

    Example::

        CompressionSchedule(uncompressed_first=0.01, recipes={10_000: "balanced"})
    """

    def __init__(
        self,
        uncompressed_first: int | float = 0,
        uncompressed_last: int | float = 0,
        recipes: dict[int, str] | None = None,
        by_step: Callable[[int], Settings] | None = None,
        total_steps: int | None = None,
    ) -> None:
        self.uncompressed_first = _checked_span("uncompressed_first", uncompressed_first)
        self.uncompressed_last = _checked_span("uncompressed_last", uncompressed_last)
        self.recipes = _checked_recipes(recipes or {})
        if by_step is not None and recipes:
            raise ValueError(
                f"recipes={recipes!r} and by_step were both given, and both say which recipe is used; leave one out."
            )
        if by_step is not None and not callable(by_step):
            raise ValueError(f"by_step={by_step!r} is not a function; use one that takes a step and gives a recipe.")
        self.by_step = by_step
        self.total_steps = None if total_steps is None else checked_every_n_steps(total_steps, "total_steps")
        self._host: Host | None = None
        self._num_first = 0
        self._first_of_last: float = math.inf
        self._announced = Phase()
        self._applied: Phase | None = None  # to the session, which is new after `attach`

    def attach(self, loop: pl.Trainer | Fabric) -> None:
        """Schedule what the strategy of `loop` compresses; once after set-up, on all ranks.

        Raises:
            TypeError: when the strategy is not `TacoTPStrategy`.
            ValueError: when the length of the run is needed and not known.
        """
        self._host = host_of(loop, type(self).__name__)
        self._find_spans(self._length_of(loop))
        self._applied = None
        if self._host.compression.session is None:
            rank_zero_info("lightning_taco: CompressionSchedule does nothing, since compression is off")

    def start_step(self, step: int) -> None:
        """Before the forward of training step `step`: put to use what holds in it."""
        if self._host is None or self._host.compression.session is None:
            return
        phase = self.phase(step)
        if phase.name is None:
            before = self._applied or Phase()
            phase = replace(phase, name=before.name, settings=before.settings)
        if phase != self._applied:
            self._apply(phase)
        self._announce(phase, step)

    def end_step(self, step: int, loss: Any = None) -> None:
        """After the optimizer step; nothing to do."""

    def phase(self, step: int) -> Phase:
        """What holds in `step`.

        Raises:
            ValueError: when `by_step` gives an unknown recipe.
            TypeError: when it gives anything else.
        """
        if step < self._num_first:
            return Phase(f"first {self._num_first} steps", name=None)
        if step >= self._first_of_last:
            return Phase(f"last steps, from {self._first_of_last:g} on", name=None)
        return self._settings(step)

    @override
    def state_dict(self) -> dict[str, Any]:
        """What was announced last, so that a resumed run does not announce it again; the same on all ranks."""
        return {"suspended": self._announced.suspended, "settings": self._announced.name}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, before or after `attach`."""
        self._announced = Phase(state_dict["suspended"], state_dict["settings"])
        self._applied = None

    def _settings(self, step: int) -> Phase:
        if self.by_step is not None:
            return _phase_of(self.by_step(step))
        begun = [first for first in self.recipes if first <= step]
        return _phase_of(self.recipes[max(begun)]) if begun else Phase()

    def _apply(self, phase: Phase) -> None:
        assert self._host is not None
        compression = self._host.compression
        assert compression.session is not None
        compression.session.suspend(OWNER, {} if phase.suspended is None else {None: phase.suspended})
        applied = self._applied or Phase()
        if (phase.name, phase.settings) != (applied.name, applied.settings):
            compression.switch(_config(phase.settings, compression.config))
        self._applied = phase

    def _announce(self, phase: Phase, step: int) -> None:
        assert self._host is not None
        before, self._announced = self._announced, phase
        if phase.suspended is not None:
            # What settings are left at is said when they come into use.
            self._announced = replace(phase, name=before.name)
        elif phase.name != before.name:
            self._host.event(Event(step, OWNER, "switch", "", f"{phase.name} from now on"))
        if phase.suspended != before.suspended:
            action = "resume" if phase.suspended is None else "suspend"
            reason = phase.suspended or f"no longer {before.suspended}"
            self._host.event(Event(step, OWNER, action, "", reason))

    def _find_spans(self, total_steps: int | None) -> None:
        self._num_first = _num_steps(self.uncompressed_first, total_steps)
        num_last = _num_steps(self.uncompressed_last, total_steps)
        self._first_of_last = math.inf if not num_last or total_steps is None else max(0, total_steps - num_last)

    def _length_of(self, loop: pl.Trainer | Fabric) -> int | None:
        """Steps of the run, ``None`` where that is not needed."""
        needing = {
            "uncompressed_first": bool(self.uncompressed_first) and isinstance(self.uncompressed_first, float),
            "uncompressed_last": bool(self.uncompressed_last),
        }
        name = next((name for name, is_needing in needing.items() if is_needing), None)
        if name is None or self.total_steps is not None:
            return self.total_steps
        total = loop.estimated_stepping_batches if isinstance(loop, pl.Trainer) else math.inf
        if total == math.inf:
            remedy = "set trainer.max_steps, or " if isinstance(loop, pl.Trainer) else ""
            raise ValueError(
                f"{name}={getattr(self, name)!r} depends on the length of the run, which is not known; {remedy}give "
                "CompressionSchedule(total_steps=...)."
            )
        return int(total)


def _phase_of(settings: Settings) -> Phase:
    config = resolve_compression(settings)
    if config is None or config.is_empty:
        return Phase("recipe 'none'", name=None)
    return Phase(None, f"recipe {settings!r}" if isinstance(settings, str) else _words(config), settings)


def _config(settings: Settings, base: CompressionConfig | None) -> CompressionConfig:
    """What to switch to: whole settings as they are, the codecs of a recipe within those of the strategy."""
    assert base is not None, "there is a session, so there are settings"
    if not isinstance(settings, str):
        return settings or base
    recipe = resolve_compression(settings)
    assert recipe is not None, "a recipe that compresses nothing is a suspension"
    return replace(base, forward=recipe.forward, backward=recipe.backward)


def _words(config: CompressionConfig) -> str:
    """Short, for the user; the whole follows in the lines of the switch."""
    parts = [f"{way} {getattr(config, way) or 'as it is'}" for way in ("forward", "backward")]
    others = ("min_bytes", "exclude", "recipes", "during_validation")
    parts += [f"{name}={getattr(config, name)!r}" for name in others if getattr(config, name)]
    return "; ".join(parts)


def _num_steps(span: int | float, total_steps: int | None) -> int:
    if isinstance(span, int):
        return span
    return math.ceil(span * total_steps) if total_steps is not None else 0


def _checked_span(name: str, span: object) -> int | float:
    is_count = isinstance(span, int) and not isinstance(span, bool) and span >= 0
    is_share = isinstance(span, float) and 0.0 <= span <= 1.0
    if not is_count and not is_share:
        raise ValueError(
            f"{name}={span!r} is neither a number of steps nor a share of the run; use an integer from 0 up, or a "
            "float from 0.0 to 1.0."
        )
    return span  # type: ignore[return-value]


def _checked_recipes(recipes: object) -> dict[int, str]:
    if not isinstance(recipes, Mapping):
        raise ValueError(f"recipes={recipes!r} is not a mapping of steps to recipes; use {{}} for none.")
    for step, recipe in recipes.items():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"recipes has the key {step!r}, which is not a step; use integers from 0 up.")
        if not isinstance(recipe, str) or recipe not in RECIPE_NAMES:
            known = ", ".join(map(repr, RECIPE_NAMES))
            raise ValueError(f"recipes[{step}]={recipe!r} is unknown; use one of {known}.")
    return dict(recipes)
