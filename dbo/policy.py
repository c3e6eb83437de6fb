"""Whether a step runs as two tracks: decided from numbers that all ranks have, so that all decide alike.

Two tracks read every weight twice: a gain only where the exchange is longer than that costs.

    one    compute(all) + exchange                two    2 x compute(half), the exchange under it

The measured times of steps of about this many tokens decide; until both kinds were measured lately, modelled ones if
there are any; else what is known of smaller steps. Pure; knows neither votes nor how a model comes to its times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from .split import most_tokens

MARGIN = 0.02
"""Share of the step that two tracks must gain before they are switched on; they stay on while they gain anything."""
PATIENCE = 3
"""Steps in a row that must wish for the other number of tracks before it changes."""
FORGET_STEPS = 512
"""A measured time is not believed for longer: contexts grow, machines change."""
NEW_SHARE = 0.25
"""Weight of the latest step in a measured time."""
LOPSIDED = 0.75
"""Share of the tokens that the fullest track may have to have before a cut is no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DboConfig:
    """Dual-batch overlap; equal on every rank."""

    dbo: Literal["off", "on", "auto"] = "off"
    """Cut steps in two so that one half computes while the other's rows travel: off; on: whenever a step has enough
    tokens; auto: where that is faster, by measured or modelled times."""

    dbo_tracks: int = 2
    """Parts that such a step is cut into."""

    dbo_order: Literal["abreast", "staggered"] = "abreast"
    """How the parts take turns. abreast: each goes on until it waits for rows; staggered: attention in two halves, and
    one part a stage ahead, so that no two exchanges are under way at once."""

    dbo_decode_token_threshold: int = 32
    """Tokens on the fullest rank from which a step that only decodes may be cut."""

    dbo_prefill_token_threshold: int = 512
    """Tokens on the fullest rank from which a step that computes prompts may be cut."""

    comm_sms: int = 20
    """Multiprocessors of a GPU that kernels leave to exchanges while both run; 0: exchanges need none."""

    def __post_init__(self) -> None:
        if self.dbo not in ("off", "on", "auto"):
            raise ValueError(f"dbo is {self.dbo!r}; it must be off, on or auto, e.g. auto")
        if self.dbo_order not in ("abreast", "staggered"):
            raise ValueError(f"dbo_order is {self.dbo_order!r}; it must be abreast or staggered, e.g. abreast")
        least = {"dbo_tracks": 2, "dbo_decode_token_threshold": 1, "dbo_prefill_token_threshold": 1, "comm_sms": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {value}, e.g. {value}")

    @property
    def most_tracks(self) -> int:
        """Tracks that any step can have."""
        return 1 if self.dbo == "off" else self.dbo_tracks


class Choice(StrEnum):
    """Why a step is cut, or why not."""

    CUT = "cut"
    OFF = "off"
    FEW_DECODE_TOKENS = "below the decode threshold"
    FEW_TOKENS = "below the prefill threshold"
    LOPSIDED = "one row has most of the tokens"
    UNMEASURED = "not measured yet"
    NO_GAIN = "the exchange is too short"
    NOT_YET = "waits for more steps that say so"


class Need(NamedTuple):
    """What a step is, the same on all ranks: the largest of each on any of them.

    decode_tokens, context_tokens   of rows that only decode: theirs, and what they attend to, all together
    longest_row                     tokens of one row
    has_prompts                     on any rank
    """

    tokens: int
    decode_tokens: int
    context_tokens: int
    longest_row: int
    has_prompts: bool


class Taken(NamedTuple):
    """What a step took: its slowest rank's own work, and the least that any rank waited for exchanges."""

    compute_us: float
    exchange_us: float

    @property
    def wall_us(self) -> float:
        return self.compute_us + self.exchange_us


class Believed(NamedTuple):
    """A measured time, and the number of the step that it was last heard of."""

    taken: Taken
    number: int


class OverlapModel(Protocol):
    """Modelled times."""

    def times_us(self, need: Need, tracks: int) -> tuple[float, float] | None:
        """The step in one track and in so many; None for steps that it does not know."""
        ...


Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapState:
    """What the next choice depends on besides the step.

    wished, streak    what the last steps wished for, and how many in a row wished against what is in force (`is_on`)
    last              the step whose measured time is to come: its kind and its tracks
    known             kind of step -> what it took, by number of tracks
    counts            choice -> steps, since the start
    """

    config: DboConfig = field(default_factory=DboConfig)
    model: OverlapModel | None = None
    is_on: bool = False
    streak: int = 0
    number: int = 0
    last: tuple[Need, int] | None = None
    known: Mapping[Key, Believed] = field(default_factory=dict)
    counts: Mapping[Choice, int] = field(default_factory=dict)


class Decision(NamedTuple):
    """Tracks of a step, most tokens that any rank has in one of them, why, and the state after it."""

    tracks: int
    track_tokens: int
    choice: Choice
    state: OverlapState


def choose(need: Need, taken: Taken, state: OverlapState) -> Decision:
    """Decide one step. `taken` is what the last one took, if one ran."""
    config = state.config
    if config.dbo == "off":
        return Decision(1, need.tokens, Choice.OFF, state)
    state = _learn(taken, state)
    most = most_tokens(need.tokens, num_tracks=config.dbo_tracks, longest_row=need.longest_row)
    choice = _too_small(need, config)
    if choice is None and config.dbo == "auto" and most > LOPSIDED * need.tokens:
        choice = Choice.LOPSIDED
    if choice is None:
        choice, state = _worth(need, state) if config.dbo == "auto" else (Choice.CUT, state)
    tracks = config.dbo_tracks if choice is Choice.CUT else 1
    counts = {**state.counts, choice: state.counts.get(choice, 0) + 1}
    state = replace(state, counts=counts, last=(need, tracks), number=state.number + 1)
    return Decision(tracks, most if tracks > 1 else need.tokens, choice, state)


def halted(taken: Taken, state: OverlapState) -> OverlapState:
    """After a beat in which nothing runs."""
    return replace(_learn(taken, state), last=None) if state.last else state


def _too_small(need: Need, config: DboConfig) -> Choice | None:
    if need.has_prompts:
        return Choice.FEW_TOKENS if need.tokens < config.dbo_prefill_token_threshold else None
    return Choice.FEW_DECODE_TOKENS if need.tokens < config.dbo_decode_token_threshold else None


def _worth(need: Need, state: OverlapState) -> tuple[Choice, OverlapState]:
    """Whether times say so, and have said so for long enough."""
    times = _times_us(need, state)
    if times is None:
        return Choice.UNMEASURED, state
    one_us, two_us = times
    wish = two_us < one_us * (1.0 if state.is_on else 1.0 - MARGIN)
    streak = state.streak + 1 if wish != state.is_on else 0
    changes = streak >= PATIENCE
    state = replace(state, is_on=wish if changes else state.is_on, streak=0 if changes else streak)
    if state.is_on:
        return Choice.CUT, state
    return (Choice.NOT_YET if wish else Choice.NO_GAIN), state


def _times_us(need: Need, state: OverlapState) -> tuple[float, float] | None:
    """The step in one track and in several: measured, modelled, or bounded by what smaller steps took."""
    tracks = state.config.dbo_tracks
    one, cut = _believed(state, _key(need, 1)), _believed(state, _key(need, tracks))
    if one and cut:
        return one.wall_us, cut.wall_us
    modelled = state.model.times_us(need, tracks) if state.model else None
    if modelled or not one:
        return modelled
    part = _believed(state, _key(need._replace(tokens=-(-need.tokens // tracks)), 1)) or one
    return one.wall_us, max(tracks * part.compute_us, one.exchange_us)


def _believed(state: OverlapState, key: Key) -> Taken | None:
    found = state.known.get(key)
    return found.taken if found and state.number - found.number <= FORGET_STEPS else None


def _learn(taken: Taken, state: OverlapState) -> OverlapState:
    """Put the last step's time to what is known of its kind."""
    if state.last is None or not taken.wall_us:
        return state
    key = _key(*state.last)
    before = _believed(state, key)
    if before is not None:
        taken = Taken(*[old + NEW_SHARE * (new - old) for old, new in zip(before, taken, strict=True)])
    return replace(state, known={**state.known, key: Believed(taken, state.number)})


def _key(need: Need, tracks: int) -> Key:
    """Steps of one kind: as many tracks, prompts or none, and about as many tokens (within an eighth)."""
    shift = max(need.tokens.bit_length() - 4, 0)
    return 2 * tracks + need.has_prompts, need.tokens >> shift, shift
