"""Multi-head latent attention over a paged latent cache."""

from .cache import CacheFormat, LatentCache
from .config import MlaConfig, RopeConfig, YarnScaling
from .latent_rows import fp8_row_bytes
from .layer import attend, core, project
from .matrix import Fp8Matrix, Fp8Rows, Matrix, Rows, plain
from .norm import rms_norm, wide
from .ops import AttentionOps, attention_ops, interpreted
from .page_table import PageTable, Spans, TokenColumns
from .reference import Partial, Queries, absorbed_attention, merge, naive_attention
from .rope import Rotation, angles, rotate
from .tiling import Tiling
from .view import PagedView
from .weights import MlaWeights, down_names, fp8_names, mla_shapes

__all__ = [
    "AttentionOps",
    "CacheFormat",
    "Fp8Matrix",
    "Fp8Rows",
    "LatentCache",
    "Matrix",
    "MlaConfig",
    "MlaWeights",
    "PageTable",
    "PagedView",
    "Partial",
    "Queries",
    "RopeConfig",
    "Rotation",
    "Rows",
    "Spans",
    "Tiling",
    "TokenColumns",
    "YarnScaling",
    "absorbed_attention",
    "angles",
    "attend",
    "attention_ops",
    "core",
    "down_names",
    "fp8_names",
    "fp8_row_bytes",
    "interpreted",
    "merge",
    "mla_shapes",
    "naive_attention",
    "plain",
    "project",
    "rms_norm",
    "rotate",
    "wide",
]
