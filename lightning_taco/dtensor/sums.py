"""What every observer of exchanges does: measure one beside the training, add up by site, and agree at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.collectives import timing
from lightning_taco.dtensor.exchange import Exchange, SiteKey


class SumsBySite(dict[SiteKey, Tensor]):
    """Tensors of one shape, added up on the device by the site of the exchange that they were measured of."""

    def add(self, key: SiteKey, exchange: Exchange, measure: Callable[[Exchange], Tensor]) -> None:
        """Add what `measure` makes of `exchange`, whose tensor it gets without a history.

        It is no part of the training: no gradient, no autocast, which would run norms in the model's low precision, and
        left out where a step is timed. Nothing waits for the device.
        """
        tensor = exchange.tensor
        with timing.aside(), torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            sums = measure(replace(exchange, tensor=tensor.detach()))
        self[key] = self[key] + sums if key in self else sums

    def over(self, group: dist.ProcessGroup, keys: Iterable[SiteKey] | None = None) -> dict[SiteKey, list]:
        """The sums over the ranks of `group`, nested lists of floats; all of them call it, with the same keys.

        Args:
            group: the ranks.
            keys: those of the sites that are meant, all of them seen; ``None`` for all that were seen.

        Waits for the device.
        """
        keys = list(self if keys is None else keys)
        if not keys:
            return {}
        table = torch.stack([self[key] for key in keys])
        dist.all_reduce(table, group=group)
        return dict(zip(keys, table.tolist(), strict=True))
