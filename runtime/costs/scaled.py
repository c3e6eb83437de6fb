"""Measured times carried over to another model or device: each operation by the ratio of what the peaks say of both.

    time here = time measured there x bound here / bound there

What was measured knows launches, floors and how far kernels stay below a peak; the bounds know sizes and rates. An
estimate: a kernel need not lose the same share of the peak on shapes or devices that it was never timed on.
"""

from __future__ import annotations

from dataclasses import dataclass

from .costs import Operations, StepFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledOperations:
    """`Operations` of a model on a device, from `measured` ones of another model or device.

    there   bound of what was measured, its group built the same way
    here    bound of what is asked for
    """

    measured: Operations
    there: Operations
    here: Operations

    @property
    def frame(self) -> StepFrame:
        """See `Operations`. The host is what it was."""
        measured, there, here = self.measured.frame, self.there.frame, self.here.frame
        head_us = _scaled(measured.head_us, there.head_us, here.head_us)
        return here._replace(head_us=head_us, host_us=measured.host_us)

    def attention_us(self, tokens: float, context_len: float) -> float:
        """See `Operations`."""
        bounds = [bound.attention_us(tokens, context_len) for bound in (self.there, self.here)]
        return _scaled(self.measured.attention_us(tokens, context_len), *bounds)

    def experts_us(self, tokens: float, *, mean_tokens: float) -> float:
        """See `Operations`."""
        bounds = [bound.experts_us(tokens, mean_tokens=mean_tokens) for bound in (self.there, self.here)]
        return _scaled(self.measured.experts_us(tokens, mean_tokens=mean_tokens), *bounds)

    def exchange_us(self, tokens: float) -> float:
        """See `Operations`."""
        bounds = [bound.exchange_us(tokens) for bound in (self.there, self.here)]
        return _scaled(self.measured.exchange_us(tokens), *bounds)

    def dense_us(self, tokens: float) -> float:
        """See `Operations`."""
        return _scaled(self.measured.dense_us(tokens), self.there.dense_us(tokens), self.here.dense_us(tokens))

    def prefill_us(self, position: float) -> float:
        """See `Operations`."""
        bounds = [bound.prefill_us(position) for bound in (self.there, self.here)]
        return _scaled(self.measured.prefill_us(position), *bounds)


def _scaled(measured_us: float, there_us: float, here_us: float) -> float:
    """Where there is no bound to go by, the one here is all that is known."""
    return measured_us * here_us / there_us if there_us > 0 else here_us
