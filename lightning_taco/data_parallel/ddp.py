"""TLq-HS under DistributedDataParallel: a communication hook, for users of plain DDP."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_taco.codec import VALUE_DTYPES
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.fsdp import average_as_it_is
from lightning_taco.data_parallel.seeds import derived_seed
from lightning_taco.data_parallel.session import DataParallelSession, required_settings
from lightning_taco.data_parallel.settings import DataParallelConfig
from lightning_taco.data_parallel.side_stream import SideStream

logger = logging.getLogger(__name__)
BUCKETS = 3  # part of a seed


class CompressedBuckets:
    """Averages DDP's buckets of gradients, on a stream of its own, so that backward goes on meanwhile.

    Attributes:
        num_calls: buckets so far; part of the seed.
    """

    def __init__(self, exchange: GradientExchange, config: DataParallelConfig) -> None:
        self.num_calls = 0
        self.is_active = True
        self._exchange, self._config = exchange, config
        self._side = SideStream()

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of the bucket over all ranks, in its own memory."""
        values = bucket.buffer()
        devices = [values.device] if values.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        with self._side.beside_backward(values.device):
            self._average(values)
            future.set_result(values)
        return future

    def _average(self, values: Tensor) -> None:
        self.num_calls += 1
        average_bucket(values, self._exchange, self._config, self.num_calls if self.is_active else None)


def average_bucket(values: Tensor, exchange: GradientExchange, config: DataParallelConfig, call: int | None) -> None:
    """The mean of `values` ``[N]`` over all ranks, in place; `call` is part of the seed, ``None``: off."""
    if call is None:
        average_as_it_is(values, exchange, "switched off")
    elif not config.compresses_gradients:
        average_as_it_is(values, exchange, "no codec for gradients")
    elif values.dtype not in VALUE_DTYPES:
        average_as_it_is(values, exchange, f"dtype {str(values.dtype).removeprefix('torch.')}")
    elif values.numel() * values.element_size() < config.min_bytes:
        average_as_it_is(values, exchange, f"smaller than min_bytes={config.min_bytes}")
    else:
        factor = 1.0 / exchange.groups.world_size
        exchange.all_reduce(values, values, factor=factor, seed=derived_seed(config.seed, BUCKETS, call))


# DDP compares the annotations, so this module may not turn them into strings.
def _hook(buckets: CompressedBuckets, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return buckets.average(bucket)


def compress_ddp(
    model: DistributedDataParallel,
    config: DataParallelConfig | Mapping[str, Any] | str = "tlq_hs",
    *,
    warn: Callable[[str], None] = logger.warning,
) -> DataParallelSession:
    """Compress the gradients that DistributedDataParallel averages: one line for users of plain DDP.

    Every rank calls it once, before the first backward. Under ``no_sync`` nothing is exchanged.

    Args:
        model: the wrapped model.
        config: a recipe name (``"tlq_hs"``, ``"sdp4bit"``) or the settings; weights do not travel under DDP.
        warn: called with what the user should look into.

    Returns:
        The session, which counts and goes into checkpoints. DDP keeps its hook; after ``detach()`` it sends
        gradients as they are.

    Raises:
        ValueError: for settings that compress no gradient, and, by DDP, for a model that has a hook already.

    Example::

        model = DistributedDataParallel(model)
        session = compress_ddp(model)
    """
    settings = required_settings(config)
    if not settings.compresses_gradients:
        raise ValueError(f"{config!r} compresses weights only, which do not travel under DDP; use 'tlq_hs'.")
    session = DataParallelSession(settings, warn=warn)
    buckets = CompressedBuckets(session.exchange(model.process_group), settings)
    session.count("buckets", buckets)
    model.register_comm_hook(buckets, _hook)
    session.on_detach(lambda: setattr(buckets, "is_active", False))
    return session
