"""Random numbers without a state: Philox4x32-10, a keyed function from a counter to 128 random bits.

From "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes, Dror, Shaw, SC 2011), https://doi.org/10.1145/2063384.2063405
and its library Random123. A sampled token takes the number that its seed, position and choice index name: nothing is
carried from step to step, so a step can be run again, a request moved or preempted, a batch mixed differently, and the
number is the same. What it does not know: tokens, requests, devices.

Number formats, the same for a kernel: words are unsigned 32-bit. Here they travel in int64, and products are taken in
16-bit halves so that no intermediate reaches 2**63. key = (seed mod 2**32, seed div 2**32); counter = (position, choice
index, draw, 0). With output words w0..w3, k = (w0 << 20) | (w1 >> 12) has 52 bits and the number is (2k + 1) / 2**53: a
float64, exact, never 0 and never 1.

Shapes: B numbers wanted.
"""

import torch
from torch import Tensor

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox4x32_10(counter_B4: Tensor, key_B2: Tensor) -> Tensor:
    """[B, 4] random words for [B, 4] counter words under [B, 2] key words; all int64 holding 0 .. 2**32 - 1."""
    c0, c1, c2, c3 = counter_B4.unbind(-1)
    k0, k1 = key_B2.unbind(-1)
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiply(words_B: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of words * multiplier."""
    low_part = (words_B & 0xFFFF) * multiplier
    high_part = (words_B >> 16) * multiplier + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def uniform(seed_B: Tensor, *, position_B: Tensor, choice_B: Tensor, draw: int) -> Tensor:
    """[B] float64 numbers strictly between 0 and 1, a function of these four alone.

    All int64. seed_B holds the 64 bits of the seed (`seed_bits` makes them of a Python int); the others are words.
    """
    key_B2 = torch.stack((seed_B & _WORD, (seed_B >> 32) & _WORD), dim=-1)
    draw_B, zero_B = torch.full_like(position_B, draw), torch.zeros_like(position_B)
    words_B4 = philox4x32_10(torch.stack((position_B, choice_B, draw_B, zero_B), dim=-1), key_B2)
    bits_B = (words_B4[:, 0] << 20) | (words_B4[:, 1] >> 12)
    return (2 * bits_B + 1).to(torch.float64) * 2.0**-53


def seed_bits(seed: int) -> int:
    """The bits of a seed of 0 .. 2**64 - 1 as an int64 holds them: seeds from 2**63 on come out negative."""
    assert 0 <= seed < 2**64, seed
    return seed - 2**64 if seed >= 2**63 else seed
