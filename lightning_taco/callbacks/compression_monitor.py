"""`CompressionMonitor`: what compression does to the tensors of every site, in whatever logger the user has."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_taco.callbacks.host import Host, host_of, pipeline_of
from lightning_taco.callbacks.hosted import HostedCallback
from lightning_taco.callbacks.pipeline_sites import over_stages
from lightning_taco.callbacks.sampling import checked_every_n_steps
from lightning_taco.collectives import timing
from lightning_taco.dtensor.errors import ErrorKey, SiteError
from lightning_taco.dtensor.exchange_errors import ExchangeError, ExchangeErrors
from lightning_taco.dtensor.histograms import HistogramSampler, RotationHistograms
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.pipeline import Pipeline

QUANTILES = {"50": 0.5, "90": 0.9, "99": 0.99, "99.9": 0.999, "100": 1.0}
"""Percent, as in the tags, to share."""


class CompressionMonitor(HostedCallback):
    """Logs, by site, how far decoded tensors and whole exchanges lie from the exact ones, and the bytes saved.

    Tags, where ``<site>`` is ``<direction>/<module path>/<collective>``, such as
    ``forward/model.blocks.0.mlp.down/all_reduce``:

    ==================================================  ================================================================
    ``compression/relative_error/<site>``               of one quantisation: ``||x' - x|| / ||x||``; infinite beside a
                                                        NaN or an Inf
    ``compression/decibels/<site>``                     the same as ``20 log10``
    ``compression/nonfinite/<site>``                    NaN and Inf values, only where there are any
    ``compression/bytes_saved/<site>``                  of the measured batch, by all ranks of the group together
    ``compression/collective_error/<site>``             of what the whole exchange gives, against the exact one
    ``compression/cancellation/<site>``                 ``A = sum_i ||x_i||^2 / ||sum_i x_i||^2`` over ranks, of sums
    ``compression/message_<q>_before_rotation/<site>``  the magnitude that q percent (50, 90, 99, 99.9, 100) of the
                                                        values stay within, over their root mean square
    ``compression/message_<q>_after_rotation/<site>``   the same of the rotated values, which are what is quantised
    ``compression/worst_relative_error``                of all sites
    ``compression/ratio``                               bytes that would have been sent over bytes sent, so far
    ``compression/total_bytes_sent``                    by all ranks of the group together, so far
    ``compression/total_bytes_saved``                   the same
    ==================================================  ================================================================

    A TensorBoard logger also gets ``compression/message_before_rotation/<site>`` and ``..._after_rotation/<site>`` as
    histograms. Values are those of one tensor-parallel group, the first one in the logs. A forward that activation
    checkpointing computes again is not measured again.

    Under a pipeline values are those of all stages. ``<site>`` is
    ``<direction>/tensor_parallel/stage_<i>/<module path>/<collective>``, and
    ``<direction>/pipeline_parallel/stage_<i>_to_<j>/<module path>/send`` for what travels between stages.

    A Fabric script calls `attach` once after ``fabric.setup_module``, `start_step` before each forward, `end_step`
    after each optimizer step.

    Args:
        every_n_steps: measure and log every how many training batches, whatever ``Trainer(log_every_n_steps)`` is; it
            replaces the strategy's ``sample_every_n_steps``, so that nothing is measured twice. With Fabric, every how
            many forwards of a module in training mode.
        num_exact_sites: at how many sites a measured batch repeats the exchange, compressed and exactly, for its error
            and its cancellation. Sites take turns. 0 for none, ``None`` for all.
        num_histograms: at how many sites the distribution of messages is logged: those with the largest errors in the
            first measured batch, which looks at all.

    Raises:
        TypeError: at set-up, when the strategy is not `TacoTPStrategy`.
        ValueError: for `every_n_steps` below 1, or a negative number of sites.

    Cost, of a batch that is measured: an encode and a decode of each message; for each of `num_exact_sites` one
    exchange more as it is, in fp32 where it adds, and one compressed; one wait for the device. Of other batches: a
    test for each exchange.
    """

    def __init__(self, every_n_steps: int = 50, num_exact_sites: int | None = 8, num_histograms: int = 4) -> None:
        self.every_n_steps = checked_every_n_steps(every_n_steps)
        self.num_exact_sites = None if num_exact_sites is None else _checked_number("num_exact_sites", num_exact_sites)
        self.num_histograms = _checked_number("num_histograms", num_histograms)
        self._host: Host | None = None
        self._session: CompressionSession | None = None
        self._num_logged_samples = 0
        self._num_logged_transfers = 0
        self._exchanges: ExchangeErrors | None = None
        self._histograms: HistogramSampler | None = None
        self._histogram_sites: list[ErrorKey] | None = None

    def attach(self, loop: pl.Trainer | Fabric) -> None:
        """Take over the sampling of the strategy of `loop`, after it has set the model up.

        Raises:
            TypeError: when the strategy is not `TacoTPStrategy`.
        """
        self._host = host_of(loop, type(self).__name__)
        compression = self._host.compression
        compression.sample_every_n_steps = self.every_n_steps
        self._num_logged_samples = compression.num_samples
        pipeline = pipeline_of(loop)
        if pipeline is not None:
            pipeline.sample_every_n_steps = self.every_n_steps
            self._num_logged_transfers = pipeline.num_samples
        self._session = compression.session
        self._exchanges, self._histograms, self._histogram_sites = None, None, None
        if self._session is not None:
            self._exchanges = ExchangeErrors(self._session, self.num_exact_sites)
            self._session.observers.append(self._exchanges)
            if self.num_histograms:
                self._histograms = HistogramSampler(self._session)
                self._session.observers.append(self._histograms)

    def start_step(self, step: int) -> None:
        """Forget what an interrupted step has left."""
        for observer in (self._exchanges, self._histograms):
            if observer is not None:
                observer.clear()

    def end_step(self, step: int, loss: Any = None) -> None:
        """Log what the step has measured, if it has; the same on all ranks of a tensor-parallel group."""
        host = self._host
        if host is None:
            return
        pipeline = pipeline_of(host.loop)
        is_new = self._session is not None and host.compression.num_samples != self._num_logged_samples
        is_transfer_new = pipeline is not None and pipeline.num_samples != self._num_logged_transfers
        if not is_new and not is_transfer_new:
            return
        self._num_logged_samples = host.compression.num_samples
        self._num_logged_transfers = 0 if pipeline is None else pipeline.num_samples
        with timing.aside():
            self._log_sample(step, host, pipeline)

    def _log_sample(self, step: int, host: Host, pipeline: Pipeline | None) -> None:
        session, exchanges = self._session, self._exchanges
        values: dict[str, float] = {}
        histograms: dict[ErrorKey, RotationHistograms] = {}
        if session is not None and exchanges is not None:
            values = scalars(host.compression)
            for key, error in exchanges.read().items():
                values.update(_exchange_scalars(key, error))
            values.update(_total_bytes(session, host.strategy.root_device))
            histograms = self._read_histograms(host.compression)
            for key, pair in histograms.items():
                values.update(_quantile_scalars(key, pair))
        host.log(values if pipeline is None else over_stages(values, pipeline), step)
        for key, pair in histograms.items():
            host.log_histogram(f"compression/message_before_rotation/{_name(key)}", pair.before, step)
            if pair.after is not None:
                host.log_histogram(f"compression/message_after_rotation/{_name(key)}", pair.after, step)

    def _read_histograms(self, compression: Compression) -> dict[ErrorKey, RotationHistograms]:
        if self._histograms is None:
            return {}
        if self._histogram_sites is None:
            if not compression.errors:
                return {}  # all is suspended: the first measured batch is yet to come
            # Agreed errors in the order of exchanges, and a stable sort: the same sites on all ranks.
            by_error = sorted(compression.errors, key=lambda key: -compression.errors[key].relative_l2_error)
            self._histogram_sites = by_error[: self.num_histograms]
            self._histograms.keep(self._histogram_sites)
        return self._histograms.read(self._histogram_sites)


def scalars(compression: Compression) -> dict[str, float]:
    """The last sample as tag to number."""
    values = {"compression/ratio": compression.compression_ratio}
    if compression.relative_l2_error is not None:
        values["compression/worst_relative_error"] = compression.relative_l2_error
    for key, error in compression.errors.items():
        values.update(_site_scalars(key, error))
    return values


def _name(key: ErrorKey) -> str:
    return f"{key.direction}/{key.site or 'root'}/{key.kind}"


def _site_scalars(key: ErrorKey, error: SiteError) -> dict[str, float]:
    name = _name(key)
    values = {
        f"compression/relative_error/{name}": error.relative_l2_error,
        f"compression/decibels/{name}": error.decibels,
    }
    if error.num_nonfinite:
        values[f"compression/nonfinite/{name}"] = float(error.num_nonfinite)
    return values


def _exchange_scalars(key: ErrorKey, error: ExchangeError) -> dict[str, float]:
    name = _name(key)
    values = {f"compression/bytes_saved/{name}": float(error.saved_bytes)}
    if error.relative_l2_error is not None:
        values[f"compression/collective_error/{name}"] = error.relative_l2_error
    if error.cancellation is not None:
        values[f"compression/cancellation/{name}"] = error.cancellation
    return values


def _quantile_scalars(key: ErrorKey, pair: RotationHistograms) -> dict[str, float]:
    values = {}
    for when, histogram in (("before", pair.before), ("after", pair.after)):
        if histogram is not None:
            for percent, share in QUANTILES.items():
                tag = f"compression/message_{percent}_{when}_rotation/{_name(key)}"
                values[tag] = histogram.magnitude_quantile(share)
    return values


def _total_bytes(session: CompressionSession, device: torch.device) -> dict[str, float]:
    """Summed over the group, since uneven shards make ranks send different numbers of bytes."""
    total = session.traffic.total()
    counts = torch.tensor([total.sent_bytes, total.stock_bytes - total.sent_bytes], dtype=torch.float64).to(device)
    dist.all_reduce(counts, group=session.group)
    sent, saved = counts.tolist()
    return {"compression/total_bytes_sent": sent, "compression/total_bytes_saved": saved}


def _checked_number(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is not a number of sites; use an integer from 0 up.")
    return value
