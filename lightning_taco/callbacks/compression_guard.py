"""`CompressionGuard`: sends a site, or all, in full precision where compression does harm, and tries again later."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from torch import Tensor
from typing_extensions import override

from lightning_taco.callbacks.agreed_loss import AgreedLoss
from lightning_taco.callbacks.events import Event
from lightning_taco.callbacks.host import Host, host_of, pipeline_of
from lightning_taco.callbacks.hosted import HostedCallback
from lightning_taco.callbacks.hysteresis import Hold, Hysteresis
from lightning_taco.callbacks.sampling import checked_every_n_steps, current_step
from lightning_taco.config import CodecConfig, matches_site
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.site_watch import Sighting, SiteWatch, gaussian_error
from lightning_taco.dtensor.suspensions import SiteKey

OWNER = "guard"
GAUSSIAN_ERRORS_ALLOWED = 4
ERROR_REASON = "error above its bound"
NONFINITE_REASON = "NaN or Inf"
SPIKE_REASON = "loss spike"
LOSS_REASON = "NaN or Inf loss"


class CompressionGuard(HostedCallback):
    """Goes back to full precision where compression does harm, on all ranks at once, and says what happened and why.

    A **site** is one kind of exchange of one module in one direction. Every `every_n_steps` steps the guard measures
    what the exchange of each site makes of its tensor: the error of the whole sum over ranks, so that partial sums that
    cancel each other show, or of the tensor that is sent where nothing is added. A site whose error passes its bound,
    or that met NaN or Inf, is sent as it is from the next step on. After `retry_after_steps` steps it is measured
    again, still as it is, so a trial does no harm; it is compressed again if its error is below `retry_factor` times
    its bound, and otherwise stays as it is for twice as long. The time also doubles when it fails again soon after.

    The **loss** is watched in every step. A NaN or an Inf, or more than `spike_factor` times the median of the last
    `spike_window` losses, puts all sites back for `pause_steps` steps. If the loss is still no better then, or spikes
    again soon after, the time doubles. The loss of a step is read at the end of the step after it, so that the host
    does not wait for the device: what is decided by it holds two steps after. A NaN that compression meets in forward
    shows in the loss of its own step; one of a backward shows in the loss of the next, through the weights, unless
    something leaves out such a step, as the scaler of fp16 does: those are seen in measured steps only.

    Each change is one `Event`, to the log and to loggers that keep events. What the guard does is part of the
    checkpoint (``state_dict``), so a run that is resumed decides as one that was not broken. With `CompressionSchedule`
    beside it, an exchange is compressed when neither wants it as it is. Under ``torch.compile`` module names are not
    known: all compiled exchanges of one direction and kind are one site, whose name is empty. With compression off it
    does nothing.

    In a Fabric script, call ``attach(fabric)`` once after set-up, ``start_step(step)`` before the forward of each step
    and ``end_step(step, loss)`` after the optimizer step, on all ranks, and keep ``guard.state_dict()`` in the
    checkpoint.

    Args:
        max_relative_error: the bound of a site's relative L2 error: one number, or a mapping of patterns of module
            names to numbers, of which the first that matches counts. By default, and for sites that no pattern
            matches, four times what the site's codec has on Gaussian values: 0.026 for INT8, 0.10 for E4M3. The sum of
            partial sums that are independent of each other has as much error as they have, so four times is reached
            when partial sums have 16 times the energy of their sum.
        every_n_steps: how often sites are measured.
        retry_after_steps: for how many steps a site is sent as it is before it is tried again.
        retry_factor: a site that is tried must be below this times its bound.
        spike_factor: how many times the median a loss must be to be a spike; ``None`` to look for NaN and Inf only.
            Medians that are not above zero know no spike.
        spike_window: the number of losses of which the median is taken; there is no spike before there are so many.
        pause_steps: for how many steps all sites are sent as they are after a spike or a NaN.

    Raises:
        ValueError: for a number out of range.
        TypeError: at set-up, when the strategy is not `TacoTPStrategy`.

    Cost: in each step, an all-reduce of 8 bytes over all processes. In a measured step, an exchange in fp32 and a
    compressed one more for each compressed exchange that adds, an encode and a decode for the others, and one wait for
    the device.
    """

    def __init__(
        self,
        max_relative_error: float | dict[str, float] | None = None,
        every_n_steps: int = 200,
        retry_after_steps: int = 1000,
        retry_factor: float = 0.5,
        spike_factor: float | None = 1.5,
        spike_window: int = 50,
        pause_steps: int = 200,
    ) -> None:
        for name, bound in _named_bounds(max_relative_error).items():
            _require(_is_number(bound) and bound > 0, name, bound, "is not a relative error; use a number above 0")
        _require(
            _is_number(retry_factor) and 0 < retry_factor <= 1,
            "retry_factor",
            retry_factor,
            "is not a share of the bound; use a number above 0, up to 1",
        )
        _require(
            spike_factor is None or (_is_number(spike_factor) and spike_factor > 1),
            "spike_factor",
            spike_factor,
            "is not a multiple of the median loss; use a number above 1, or None",
        )
        self.max_relative_error = max_relative_error
        self.every_n_steps = checked_every_n_steps(every_n_steps)
        self.retry_after_steps = checked_every_n_steps(retry_after_steps, "retry_after_steps")
        self.retry_factor = retry_factor
        self.spike_factor = spike_factor
        self.spike_window = checked_every_n_steps(spike_window, "spike_window")
        self.pause_steps = checked_every_n_steps(pause_steps, "pause_steps")
        self._host: Host | None = None
        self._watch: SiteWatch | None = None
        self._loss_sum: Tensor | None = None  # of the batches of this step
        self._step: int | None = None
        self._holds: Hysteresis[SiteKey | None] = Hysteresis()
        self._losses: deque[float] = deque(maxlen=spike_window)
        self._pending: tuple[int, AgreedLoss | float] | None = None  # the last loss, of which step

    @property
    def suspended(self) -> dict[SiteKey | None, str]:
        """What the guard sends as it is, with the reason; the key ``None`` stands for all sites."""
        return {key: hold.reason for key, hold in self._holds.holds.items()}

    # For the Trainer

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, with its last batch; Lightning has divided the losses by the number of batches."""
        loss = _loss_of(outputs)
        if loss is not None:
            self._loss_sum = loss if self._loss_sum is None else self._loss_sum + loss
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            loss, self._loss_sum = self._loss_sum, None
            self.end_step(current_step(trainer), loss)

    # For both

    def attach(self, loop: pl.Trainer | Fabric) -> None:
        """Guard what the strategy of `loop` compresses; once after set-up, on all ranks.

        Raises:
            TypeError: when the strategy is not `TacoTPStrategy`.
        """
        self._host = host_of(loop, type(self).__name__)
        self._watch, self._loss_sum = None, None
        self._tell_session()

    def start_step(self, step: int) -> None:
        """Before the forward of training step `step`; begins to look, if it is a step to measure in.

        A `step` before the last one begins a new run.
        """
        session = self._session()
        if session is None or step == self._step:
            return
        if self._step is not None and step < self._step:
            self._begin()
            self._tell_session()
        self._step = step
        self._look_away()  # from what an exception has interrupted
        due = [key for key in self._holds.due(step) if key is not None]
        is_sample = step % self.every_n_steps == 0
        if is_sample or due:
            self._watch = SiteWatch(session, due)
            self._watch.open(is_sample=is_sample)

    def end_step(self, step: int, loss: Tensor | float | None = None) -> None:
        """After the optimizer step of `step`; suspends and resumes, from the next step on.

        Args:
            step: the step that has ended.
            loss: its loss, for which the guard does not wait here; given on all ranks or on none.
        """
        session = self._session()
        if session is None:
            return
        watch = self._look_away()
        if watch is not None:
            sightings, codecs = self._of_all_stages(watch.read(), watch.codecs)
            self._judge_sites(sightings, codecs, step)
        self._judge_loss(step)
        if loss is not None:
            assert self._host is not None
            self._pending = step, AgreedLoss(loss, self._host.compression.device or torch.device("cpu"))

    @override
    def state_dict(self) -> dict[str, Any]:
        """What the guard holds back and what it knows of the loss, as plain values; the same on all ranks.

        Waits for the last loss.
        """
        return {
            "step": self._step,
            "sites": self._holds.state_dict(),
            "losses": list(self._losses),
            "pending": None if self._pending is None else [self._pending[0], _value(self._pending[1])],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, before or after `attach`."""
        self._begin()
        self._step = state_dict["step"]
        self._holds.load_state_dict(state_dict["sites"])
        self._holds.holds = {key and SiteKey(*key): hold for key, hold in self._holds.holds.items()}
        self._losses.extend(state_dict["losses"])
        if state_dict["pending"] is not None:
            step, loss = state_dict["pending"]
            self._pending = (step, loss)
        self._tell_session()

    def _begin(self) -> None:
        self._step, self._pending = None, None
        self._holds = Hysteresis()
        self._losses.clear()

    def _session(self) -> CompressionSession | None:
        return None if self._host is None else self._host.compression.session

    def _look_away(self) -> SiteWatch | None:
        """Stop looking; what has been seen since the start of the step."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        return watch

    def _of_all_stages(self, *seen: dict[Any, Any]) -> list[dict[Any, Any]]:
        """What all stages of a pipeline have seen, whose sites differ: so every rank decides alike."""
        pipeline = None if self._host is None else pipeline_of(self._host.loop)
        if pipeline is None:
            return list(seen)
        everyone = pipeline.agreement.objects(seen)
        return [{key: value for each in part for key, value in each.items()} for part in zip(*everyone, strict=True)]

    def _tell_session(self) -> None:
        session = self._session()
        if session is not None:
            session.suspend(OWNER, self.suspended)

    # Sites

    def _judge_sites(self, seen: Mapping[SiteKey, Sighting], codecs: Mapping[SiteKey, CodecConfig], step: int) -> None:
        for key, sighting in seen.items():
            bound = self._bound(key, codecs[key])
            if key in self._holds.holds:
                self._judge_trial(key, sighting, bound, step)
            elif not sighting.is_finite or sighting.relative_l2_error > bound:
                reason = ERROR_REASON if sighting.is_finite else NONFINITE_REASON
                hold = self._holds.hold(key, reason, step, self.retry_after_steps)
                self._say("suspend", key, f"{_found(sighting, bound)}; {_until(hold)}", step)

    def _judge_trial(self, key: SiteKey, sighting: Sighting, bound: float, step: int) -> None:
        limit = bound * self.retry_factor
        if sighting.is_finite and sighting.relative_l2_error < limit:
            self._holds.release(key, step)
            error = sighting.relative_l2_error
            self._say("resume", key, f"tried again: relative error {error:.3g} is below {limit:.3g}", step)
        else:
            hold = self._holds.extend(key, step)
            self._say("suspend", key, f"tried again: {_found(sighting, limit)}; {_until(hold)}", step)

    def _bound(self, key: SiteKey, codec: CodecConfig) -> float:
        if isinstance(self.max_relative_error, Mapping):
            for pattern, bound in self.max_relative_error.items():
                if matches_site(pattern, key.site):
                    return bound
        elif self.max_relative_error is not None:
            return self.max_relative_error
        return GAUSSIAN_ERRORS_ALLOWED * gaussian_error(codec)

    # Loss

    def _judge_loss(self, step: int) -> None:
        found = self._take_loss()
        reason = None if found is None else self._what_is_wrong(*found)
        pause = self._holds.holds.get(None)
        if pause is None:
            if reason is not None:
                short = SPIKE_REASON if math.isfinite(found[1]) else LOSS_REASON  # type: ignore[index]
                hold = self._holds.hold(None, short, step, self.pause_steps)
                self._say("suspend", None, f"{reason}; {_until(hold)}", step)
        elif pause.until <= step:
            if reason is None:
                self._holds.release(None, step)
                self._say("resume", None, f"{pause.num_steps} steps have passed since the {pause.reason}", step)
            else:
                hold = self._holds.extend(None, step)
                self._say("suspend", None, f"still: {reason}; {_until(hold)}", step)
        if found is not None and math.isfinite(found[1]):
            self._losses.append(found[1])

    def _take_loss(self) -> tuple[int, float] | None:
        """The loss of the last step but one, or of the one before if the last gave none."""
        if self._pending is None:
            return None
        (step, pending), self._pending = self._pending, None
        return step, _value(pending)

    def _what_is_wrong(self, step: int, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss of step {step} was NaN or Inf"
        if self.spike_factor is None or len(self._losses) < self.spike_window:
            return None
        median = statistics.median(self._losses)
        if median <= 0 or loss <= self.spike_factor * median:
            return None
        return (
            f"the loss of step {step} was {loss:.4g}, more than {self.spike_factor:g} times the median of {median:.4g}"
        )

    def _say(self, action: str, key: SiteKey | None, reason: str, step: int) -> None:
        """Tell the session and the user; every change goes through here."""
        assert self._host is not None
        self._tell_session()
        self._host.event(Event(step + 1, OWNER, action, "" if key is None else _tag(key), reason))


def _loss_of(outputs: Any) -> Tensor | None:
    """The loss in what a training step gave; ``None`` if it gave none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, Tensor) else None


def _value(loss: AgreedLoss | float) -> float:
    return loss.value() if isinstance(loss, AgreedLoss) else loss


def _tag(key: SiteKey) -> str:
    """As in the tags of `CompressionMonitor`."""
    return f"{key.direction}/{key.site or 'root'}/{key.kind}"


def _found(sighting: Sighting, limit: float) -> str:
    if not sighting.is_finite:
        return "its values were NaN or Inf"
    return f"relative error {sighting.relative_l2_error:.3g} is not below {limit:.3g}"


def _until(hold: Hold) -> str:
    return f"sent as it is for {hold.num_steps} steps"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _named_bounds(bounds: object) -> dict[str, Any]:
    if isinstance(bounds, Mapping):
        return {f"max_relative_error[{pattern!r}]": bound for pattern, bound in bounds.items()}
    return {} if bounds is None else {"max_relative_error": bounds}


def _require(is_right: bool, name: str, value: object, what: str) -> None:
    if not is_right:
        raise ValueError(f"{name}={value!r} {what}.")
