"""Root mean square norm, and the rule for the dtype in which sensitive sums are taken.

Knows nothing of where a norm sits in the model. Letters: D the normalised dim.
"""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["rms_norm", "wide"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, softmax and accumulation in a run of `dtype`: float64 stays, everything else is float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square: normalised in the wide dtype, cast to x's dtype, then times the weight.

    That order is Hugging Face's; in a 16-bit run the weight multiplies values that are already rounded.
    """
    normalised = functional.rms_norm(x.to(wide(x.dtype)), (x.shape[-1],), None, eps)
    return (normalised.to(x.dtype) * weight_D).to(x.dtype)
