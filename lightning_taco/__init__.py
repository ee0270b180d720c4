"""Compressed tensor-parallel training for PyTorch Lightning and Fabric.

Importing the package registers ``Trainer(strategy="taco_tp")``. It needs no GPU, no CUDA and no triton.
"""

from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.data_parallel import DataParallelConfig, compress_ddp, compress_fsdp
from lightning_taco.dtensor.overlap import OverlappedRowwiseParallel
from lightning_taco.pipeline_parallel import PipelineConfig
from lightning_taco.strategies.trainer import TacoTPStrategy

__version__ = "0.1.0"
__all__ = [
    "CodecConfig",
    "CompressionConfig",
    "DataParallelConfig",
    "OverlappedRowwiseParallel",
    "PipelineConfig",
    "TacoTPStrategy",
    "__version__",
    "compress_ddp",
    "compress_fsdp",
]
