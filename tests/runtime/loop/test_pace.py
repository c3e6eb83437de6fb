"""What a step may take follows from those before it."""

from runtime.loop.pace import Pace


def test_nothing_is_predicted_before_the_first_step():
    assert Pace().predict(100) == 0.0


def test_a_prompt_is_allowed_what_its_tokens_would_take_one_by_one():
    pace = Pace()
    pace.took(2, 0.5)
    assert pace.predict(8000) == 2000.0


def test_a_slow_step_is_forgotten_slowly_and_a_fast_one_changes_little():
    pace = Pace()
    pace.took(1, 1.0)
    pace.took(1, 0.1)
    assert pace.predict(1) == 0.99
    for _ in range(500):
        pace.took(1, 0.1)
    assert pace.predict(1) == 0.1
