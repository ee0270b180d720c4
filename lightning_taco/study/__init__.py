"""Which codec a run can trust: many of them, measured on a trained model's own tensor-parallel messages."""

from lightning_taco.study.callback import StudyCallback, check_studiable
from lightning_taco.study.settings import StudySettings
from lightning_taco.study.trainer import StudyTrainer

__all__ = ["StudyCallback", "StudySettings", "StudyTrainer", "check_studiable"]
