"""The step loop of a rank, and the engine that runs N of them."""

from .config import CacheConfig, EngineConfig
from .engine import Engine
from .memory import MemoryPlan
from .model_config import ModelConfig, read_model_config
from .outputs import RequestOutput, TokenEvent, TokenLogprob
from .request import FinishReason, Request
from .sampling_params import SamplingParams
from .scheduler import SchedulerConfig
from .telemetry import EngineStats, RankStats

__all__ = [
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "MemoryPlan",
    "ModelConfig",
    "RankStats",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TokenEvent",
    "TokenLogprob",
    "read_model_config",
]
