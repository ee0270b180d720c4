"""Compressed data parallelism: gradients and weights that travel, and gradients that wait, in few bits."""

from lightning_taco.data_parallel.ddp import compress_ddp
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.nodes import NodeGroups, make_node_groups
from lightning_taco.data_parallel.session import DataParallelSession, compress_fsdp
from lightning_taco.data_parallel.settings import DataParallelConfig, resolve_data_parallel
from lightning_taco.data_parallel.traffic import DataParallelTraffic

__all__ = [
    "DataParallelConfig",
    "DataParallelSession",
    "DataParallelTraffic",
    "GradientExchange",
    "NodeGroups",
    "compress_ddp",
    "compress_fsdp",
    "make_node_groups",
    "resolve_data_parallel",
]
