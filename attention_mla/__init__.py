"""Multi-head latent attention over a paged latent cache."""

from .cache import CacheFormat, LatentCache
from .config import MlaConfig, RopeConfig, YarnScaling
from .latent_rows import fp8_row_bytes
from .layer import attend, core, project
from .norm import rms_norm, wide
from .ops import AttentionOps, attention_ops, interpreted
from .page_table import PageTable, Spans, TokenColumns
from .reference import Partial, Queries, absorbed_attention, merge, naive_attention
from .rope import Rotation, angles, rotate
from .tiling import Tiling
from .view import PagedView
from .weights import MlaWeights, mla_shapes

__all__ = [
    "AttentionOps",
    "CacheFormat",
    "LatentCache",
    "MlaConfig",
    "MlaWeights",
    "PageTable",
    "PagedView",
    "Partial",
    "Queries",
    "RopeConfig",
    "Rotation",
    "Spans",
    "Tiling",
    "TokenColumns",
    "YarnScaling",
    "absorbed_attention",
    "angles",
    "attend",
    "attention_ops",
    "core",
    "fp8_row_bytes",
    "interpreted",
    "merge",
    "mla_shapes",
    "naive_attention",
    "project",
    "rms_norm",
    "rotate",
    "wide",
]
