"""Multi-head latent attention over a paged latent cache."""

from .cache import LatentCache, bytes_per_token
from .config import MlaConfig, RopeConfig, YarnScaling
from .layer import attend, core, project
from .norm import rms_norm, wide
from .reference import Partial, Queries, absorbed_attention, merge, naive_attention
from .rope import Rotation, angles, rotate
from .view import PagedView, Span, Tiling
from .weights import MlaWeights, mla_shapes

__all__ = [
    "LatentCache",
    "MlaConfig",
    "MlaWeights",
    "PagedView",
    "Partial",
    "Queries",
    "RopeConfig",
    "Rotation",
    "Span",
    "Tiling",
    "YarnScaling",
    "absorbed_attention",
    "angles",
    "attend",
    "bytes_per_token",
    "core",
    "merge",
    "mla_shapes",
    "naive_attention",
    "project",
    "rms_norm",
    "rotate",
    "wide",
]
