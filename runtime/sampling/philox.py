"""Random numbers without a state: Philox4x32-10, a keyed function from a counter to 128 random bits.

From "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon, Moraes, Dror, Shaw, SC 2011), https://doi.org/10.1145/2063384.2063405
and its library Random123. A sampled token takes the number that its seed, position and choice index name: nothing is
carried from step to step, so a step can be run again, a request moved or preempted, a batch mixed differently, and the
number is the same. What it does not know: tokens, requests, devices.

Number formats, the same for a kernel: words are unsigned 32-bit. Here they travel in uint64, which holds the product of
two. key = (seed mod 2**32, seed div 2**32); counter = (position, choice index, draw, 0). With output words w0..w3,
k = (w0 << 20) | (w1 >> 12) has 52 bits and the number is (2k + 1) / 2**53: a float64, exact, never 0 and never 1.

Shapes: B numbers wanted.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_NUM_ROUNDS = 10
_MULTIPLIERS_21 = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS_21 = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_WORD = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32_10(counter_4B: Words, key_2B: Words) -> Words:
    """[4, B] random words for [4, B] counter words under [2, B] key words; all hold 0 .. 2**32 - 1."""
    even_2B, odd_2B = counter_4B[::2], counter_4B[1::2]
    for _ in range(_NUM_ROUNDS):
        product_2B = even_2B * _MULTIPLIERS_21
        # The high half of word 2's product goes to word 0, of word 0's to word 2; the low halves to 1 and 3 likewise.
        even_2B, odd_2B = (product_2B >> _32)[::-1] ^ odd_2B ^ key_2B, (product_2B & _WORD)[::-1]
        key_2B = (key_2B + _KEY_STEPS_21) & _WORD
    return np.stack((even_2B[0], odd_2B[0], even_2B[1], odd_2B[1]))


def uniform(
    seeds: Sequence[int], *, positions: Sequence[int], choices: Sequence[int], draw: int
) -> NDArray[np.float64]:
    """[B] numbers strictly between 0 and 1, each a function of these four alone: a seed of 64 bits and three words."""
    seed_B = np.array(seeds, dtype=np.uint64)
    counter_4B = np.zeros((4, len(seed_B)), dtype=np.uint64)
    counter_4B[0], counter_4B[1], counter_4B[2] = positions, choices, draw
    words_4B = philox4x32_10(counter_4B, np.stack((seed_B & _WORD, seed_B >> _32)))
    bits_B = (words_4B[0] << np.uint64(20)) | (words_4B[1] >> np.uint64(12))
    return (2 * bits_B + 1).astype(np.float64) * 2.0**-53
