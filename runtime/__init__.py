"""The step loop of a rank, and the engine that runs N of them."""

from .engine import Engine
from .model.model_config import ModelConfig, read_model_config
from .requests.outputs import RequestOutput, TokenEvent, TokenLogprob
from .requests.request import FinishReason, Request
from .requests.sampling_params import SamplingParams
from .requests.telemetry import EngineStats, RankStats
from .scheduling.scheduler import SchedulerConfig
from .settings.config import CacheConfig, EngineConfig
from .weights.memory import MemoryPlan

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
