"""Settings: their classes, files and messages, and what follows from the data (`auto.py`)."""

from alphastomics.config.data import LoadingConfig, PreprocessingConfig, SimulationConfig
from alphastomics.config.run import DistributedConfig, ExtractConfig, LoggingConfig
from alphastomics.config.schema import (
    Config,
    DiffusionConfig,
    ExpressionConfig,
    LayerConfig,
    LossConfig,
    MaskingConfig,
    MaskStrategy,
    ModelConfig,
    SamplingConfig,
    SeedConfig,
    Solver,
    TrainingConfig,
)
from alphastomics.config.section import Section
from alphastomics.tasks import Mode

__all__ = [
    "Config",
    "DiffusionConfig",
    "DistributedConfig",
    "ExpressionConfig",
    "ExtractConfig",
    "LayerConfig",
    "LoadingConfig",
    "LoggingConfig",
    "LossConfig",
    "MaskStrategy",
    "MaskingConfig",
    "Mode",
    "ModelConfig",
    "PreprocessingConfig",
    "SamplingConfig",
    "Section",
    "SeedConfig",
    "SimulationConfig",
    "Solver",
    "TrainingConfig",
]
