"""The fullest rank of a step, against drawing many steps."""

import numpy as np
import pytest

from eplb.noise import expected_maximum, step_moments


@pytest.mark.parametrize("means", [[100.0], [100.0, 100.0], [100.0, 90.0, 50.0], [100.0] * 64, [300.0] + [10.0] * 7])
def test_the_expected_maximum_of_normal_numbers_is_that_of_many_draws(means: list[float]) -> None:
    rng = np.random.default_rng(0)
    sigma = np.linspace(5.0, 10.0, len(means))
    drawn = (np.array(means) + sigma * rng.normal(size=(50_000, len(means)))).max(axis=1)
    got = expected_maximum(np.array([means]), np.array([sigma**2]))[0]
    assert got == pytest.approx(drawn.mean(), abs=4 * drawn.std() / len(drawn) ** 0.5 + 2e-3 * sigma.max())


def test_without_variance_it_is_the_largest_mean() -> None:
    assert expected_maximum(np.array([[3.0, 7.0, 5.0]]), np.zeros((1, 3))).tolist() == [7.0]


def test_rows_of_a_step_have_the_mean_and_variance_said() -> None:
    """12 experts, 2 a token, copies of expert 0 on two ranks; drawn token by token."""
    rng = np.random.default_rng(1)
    chance = np.array([0.5, *[1.5 / 11] * 11])
    drawn = (rng.random((10_000, 40, 12)) < chance).sum(axis=1)
    first = rng.binomial(drawn[:, 0], 0.5)
    loads = np.stack([first + drawn[:, 1:6].sum(axis=1), drawn[:, 0] - first + drawn[:, 6:].sum(axis=1)], axis=1)
    parts = np.array([[[0.125, *[0.75 / 11] * 5, 0.0], [0.125, *[0.75 / 11] * 6]]])
    means, variances = step_moments(parts, top_k=2, tokens=40)
    assert means[0] == pytest.approx(loads.mean(axis=0), rel=0.01)
    assert variances[0] == pytest.approx(loads.var(axis=0), rel=0.07)
