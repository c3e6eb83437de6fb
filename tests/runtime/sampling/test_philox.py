from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sampling.philox import philox4x32_10, uniform
from runtime.sampling.sampler_reference import philox, random_number

WORDS = st.integers(0, 2**32 - 1)

# From Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def run(counters: Sequence[Sequence[int]], keys: Sequence[Sequence[int]]) -> list[list[int]]:
    """Four words for each counter and key."""
    counter_4B = np.array(counters, dtype=np.uint64).reshape(-1, 4).T
    return philox4x32_10(counter_4B, np.array(keys, dtype=np.uint64).reshape(-1, 2).T).T.tolist()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter: str, key: str, result: str) -> None:
    assert run([words(counter)], [words(key)]) == [words(result)]
    assert list(philox(words(counter), words(key))) == words(result)


def test_many_counters_at_once_give_what_each_gives_alone() -> None:
    counters = [words(counter) for counter, _, _ in KNOWN_ANSWERS]
    keys = [words(key) for _, key, _ in KNOWN_ANSWERS]
    assert run(counters, keys) == [words(result) for _, _, result in KNOWN_ANSWERS]
    assert run([], []) == []


@given(counter=st.tuples(WORDS, WORDS, WORDS, WORDS), key=st.tuples(WORDS, WORDS))
@settings(max_examples=100, deadline=None)
def test_philox_equals_the_loop_on_python_integers(counter: tuple[int, ...], key: tuple[int, int]) -> None:
    assert run([counter], [key]) == [list(philox(counter, key))]


@given(seed=st.integers(0, 2**64 - 1), position=WORDS, choice=st.integers(0, 1000), draw=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_uniform_equals_the_loop_for_every_seed_of_64_bits(seed: int, position: int, choice: int, draw: int) -> None:
    found = uniform([seed], positions=[position], choices=[choice], draw=draw)
    assert found.dtype == np.float64
    assert found.tolist() == [random_number(seed, position=position, choice_index=choice, draw=draw)]


def numbers(count: int, *, seed: int = 5, choice: int = 0, draw: int = 0) -> torch.Tensor:
    found = uniform([seed] * count, positions=range(count), choices=[choice] * count, draw=draw)
    return torch.from_numpy(found)


def test_numbers_are_strictly_between_0_and_1_and_level() -> None:
    found = numbers(100_000)
    assert 0 < found.min().item() < 1e-3
    assert 1 - 1e-3 < found.max().item() < 1
    counts = torch.histc(found, bins=100, min=0, max=1)
    # 99 degrees of freedom: 148.2 is passed once in a thousand.
    assert ((counts - 1000) ** 2 / 1000).sum().item() < 148.2


def test_the_extreme_words_stay_off_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([[0, 2**32 - 1]] * 4, dtype=np.uint64)
    monkeypatch.setattr("runtime.sampling.philox.philox4x32_10", lambda _counter, _key: extremes)
    assert uniform([0, 0], positions=[0, 0], choices=[0, 0], draw=0).tolist() == [2.0**-53, 1 - 2.0**-53]


def test_seed_choice_and_draw_each_give_another_sequence() -> None:
    base = numbers(1000)
    for other in (numbers(1000, seed=6), numbers(1000, choice=1), numbers(1000, draw=1), numbers(1000, seed=5 + 2**32)):
        assert not (base == other).any()
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1].item()) < 0.1
