"""Where a rank says it stands."""

from runtime.failure.board import Board
from runtime.failure.recorder import Watched
from runtime.failure.verdict import Phase


def test_a_step_that_is_run_again_is_stamped_where_it_happens_and_places_only_grow():
    """Ranks are compared by their places: one that runs step 5 again in step 7 is not behind one that votes for 7."""
    board = Board.create(rank=0, size=2)
    recorder = Watched(board)
    places = []
    for phase, step in [
        (Phase.DISPATCH, 5),
        (Phase.DISPATCH, 6),
        (Phase.VOTE, 7),
        (Phase.LAUNCH, 7),
        (Phase.DISPATCH, 5),
        (Phase.COMBINE, 5),
        (Phase.DISPATCH, 6),
        (Phase.READ, 8),
    ]:
        recorder.stamp(phase, step)
        stamp = board.last_stamp()
        assert stamp is not None
        places.append(stamp.place)
    assert places == sorted(places)
    assert len(set(places)) == len(places)
