import copy
import dataclasses
import json
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.errors import RequestError
from runtime.requests.sampling_params import SamplingParams

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def test_nothing_given_is_plain_sampling_of_16_tokens() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.max_tokens) == (1.0, 0, 1.0, 0.0, 16)
    assert params.logit_bias is params.seed is params.logprobs is None
    assert not params.is_greedy
    assert not params.has_penalties


ACCEPTED = [
    ("temperature", 0),
    ("temperature", 1e-300),
    ("temperature", 1e300),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 2**31 - 1),
    ("top_p", 5e-324),
    ("top_p", 1),
    ("min_p", 0),
    ("min_p", 1),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 100),
    ("presence_penalty", -2),
    ("presence_penalty", 2),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("logit_bias", {}),
    ("logit_bias", dict.fromkeys(range(1024), -100.0)),
    ("seed", 0),
    ("seed", 2**64 - 1),
    ("stop_token_ids", ()),
    ("stop_token_ids", tuple(range(128))),
    ("min_tokens", 16),
    ("max_tokens", 1),
    ("max_tokens", None),
    ("max_tokens", 2**31 - 1),
    ("logprobs", 0),
    ("logprobs", 20),
]


@pytest.mark.parametrize(("field", "value"), ACCEPTED)
def test_the_ends_of_every_range_are_legal(field: str, value: object) -> None:
    assert getattr(SamplingParams.from_dict({field: value}), field) == value


REFUSED = [
    ("temperature", -0.1, "temperature = -0.1: must be a finite number >= 0, for example 0.0"),
    ("temperature", math.inf, "temperature = inf: must be a finite number >= 0, for example 1.0"),
    ("temperature", math.nan, "temperature = nan: must be a finite number >= 0, for example 0.0"),
    ("temperature", True, "temperature = True: must be a finite number >= 0, for example 1.0"),
    ("temperature", "1", "temperature = '1': must be a finite number >= 0, for example 1.0"),
    ("temperature", None, "temperature = None: must be a finite number >= 0, for example 1.0"),
    ("top_k", -2, "top_k = -2: must be an integer from -1 to 2147483647, for example -1"),
    ("top_k", 2**31, "top_k = 2147483648: must be an integer from -1 to 2147483647, for example 2147483647"),
    ("top_k", 5.0, "top_k = 5.0: must be an integer from -1 to 2147483647, for example 0"),
    ("top_k", False, "top_k = False: must be an integer from -1 to 2147483647, for example 0"),
    ("top_p", 1.5, "top_p = 1.5: must be a number above 0 and at most 1, for example 1.0"),
    ("top_p", 0, "top_p = 0: must be a number above 0 and at most 1, for example 1.0"),
    ("top_p", math.nan, "top_p = nan: must be a number above 0 and at most 1, for example 1.0"),
    ("top_p", True, "top_p = True: must be a number above 0 and at most 1, for example 1.0"),
    ("top_p", 10**5000, "top_p = 'an integer of 16610 bits': must be a number above 0 and at most 1, for example 1.0"),
    ("min_p", -(10**5000), "min_p = 'an integer of 16610 bits': must be a number from 0 to 1, for example 0.0"),
    (
        "seed",
        10**5000,
        f"seed = 'an integer of 16610 bits': must be an integer from 0 to {2**64 - 1}, for example {2**64 - 1}",
    ),
    ("min_p", -0.5, "min_p = -0.5: must be a number from 0 to 1, for example 0.0"),
    ("min_p", 1.01, "min_p = 1.01: must be a number from 0 to 1, for example 1.0"),
    ("repetition_penalty", 0, "repetition_penalty = 0: must be a number from 0.01 to 100, for example 0.01"),
    ("repetition_penalty", -math.inf, "repetition_penalty = -inf: must be a number from 0.01 to 100, for example 0.01"),
    ("presence_penalty", 2.1, "presence_penalty = 2.1: must be a number from -2 to 2, for example 2.0"),
    ("frequency_penalty", -3, "frequency_penalty = -3: must be a number from -2 to 2, for example -2.0"),
    ("logit_bias", {3: 101}, "logit_bias = 101: must be a number from -100 to 100, for example 100.0"),
    ("logit_bias", {3: math.nan}, "logit_bias = nan: must be a number from -100 to 100, for example -100.0"),
    ("logit_bias", {-1: 1}, "logit_bias = -1: must be an integer from 0 to 2147483647, for example 0"),
    ("logit_bias", {"x": 1}, "logit_bias = 'x': must be an integer from 0 to 2147483647, for example 0"),
    ("logit_bias", {True: 1}, "logit_bias = True: must be an integer from 0 to 2147483647, for example 0"),
    ("logit_bias", [3], "logit_bias = 'a list': must map token ids to numbers, for example {7: -100.0}"),
    (
        "logit_bias",
        dict.fromkeys(range(1025), 0.0),
        "logit_bias = '1025 entries': must have at most 1024 entries, for example 'the first 1024'",
    ),
    ("seed", -1, "seed = -1: must be an integer from 0 to 18446744073709551615, for example 0"),
    ("seed", 2**64, f"seed = {2**64}: must be an integer from 0 to {2**64 - 1}, for example {2**64 - 1}"),
    ("seed", True, "seed = True: must be an integer from 0 to 18446744073709551615, for example 0"),
    ("stop_token_ids", "12", "stop_token_ids = '12': must be a list of token ids, for example [1, 2]"),
    ("stop_token_ids", 12, "stop_token_ids = 12: must be a list of token ids, for example [1, 2]"),
    ("stop_token_ids", [1, -5], "stop_token_ids = -5: must be an integer from 0 to 2147483647, for example 0"),
    (
        "stop_token_ids",
        [0] * 129,
        "stop_token_ids = '129 entries': must have at most 128 entries, for example 'the first 128'",
    ),
    ("ignore_eos", 1, "ignore_eos = 1: must be true or false, for example False"),
    ("min_tokens", -1, "min_tokens = -1: must be an integer from 0 to 2147483647, for example 0"),
    ("min_tokens", 17, "min_tokens = 17: must be at most max_tokens (16), for example 16"),
    ("max_tokens", 0, "max_tokens = 0: must be an integer from 1 to 2147483647, for example 1"),
    ("logprobs", 21, "logprobs = 21: must be an integer from 0 to 20, for example 20"),
    ("logprobs", True, "logprobs = True: must be an integer from 0 to 20, for example 0"),
    ("temprature", 0.5, "temprature = 0.5: is not a sampling field, did you mean 'temperature'?"),
    ("topK", 5, "topK = 5: is not a sampling field, did you mean 'top_k'?"),
    ("a\nb", 1, f"'a\\nb' = 1: is not a sampling field, those are {', '.join(FIELDS)}"),
    ("zzz", None, f"zzz = None: is not a sampling field, those are {', '.join(FIELDS)}"),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), REFUSED, ids=[f"{field}-{n}" for n, (field, _, _) in enumerate(REFUSED)]
)
def test_a_refusal_names_field_value_rule_and_a_legal_value(field: str, value: object, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams.from_dict({field: value})
    assert str(refusal.value) == message
    assert refusal.value.field in (field, repr(field))


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.integers() | st.text(max_size=2), st.floats() | st.none(), max_size=3),
    st.sampled_from([10**5000, -(10**5000), 1j, b"12", "9" * 6000, {"9" * 6000: 1.0}]),
)


@given(values=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), ANYTHING, max_size=4))
@settings(max_examples=300, deadline=None)
def test_anything_is_either_taken_or_refused_in_one_short_line(values: dict[str, object]) -> None:
    try:
        params = SamplingParams.from_dict(values)
    except RequestError as refusal:
        message = str(refusal)
    else:
        assert SamplingParams.from_dict(dataclasses.asdict(params)) == params
        return
    assert 0 < len(message) < 500
    assert "\n" not in message


def test_from_dict_refuses_what_is_not_an_object() -> None:
    with pytest.raises(RequestError, match="must be an object of fields and values"):
        SamplingParams.from_dict([("top_k", 1)])  # pyright: ignore[reportArgumentType]


def test_a_token_named_twice_in_a_json_bias_is_refused() -> None:
    with pytest.raises(RequestError, match="must name a token once"):
        SamplingParams.from_dict({"logit_bias": {"7": 1.0, "07": 2.0}})


def test_json_gives_the_same_parameters_back() -> None:
    params = SamplingParams(temperature=0.3, logit_bias={40: 1.5, 7: -100}, stop_token_ids=(3, 2), seed=2**63)
    assert SamplingParams.from_dict(json.loads(json.dumps(dataclasses.asdict(params)))) == params


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    params = SamplingParams(
        temperature=numpy.float32(0.5),  # pyright: ignore[reportArgumentType]
        top_k=numpy.int64(4),  # pyright: ignore[reportArgumentType]
        stop_token_ids=(numpy.int32(9),),  # pyright: ignore[reportArgumentType]
        logit_bias={numpy.int64(3): numpy.float64(1)},  # pyright: ignore[reportArgumentType]
    )
    assert params == SamplingParams(temperature=0.5, top_k=4, stop_token_ids=(9,), logit_bias={3: 1.0})
    assert (type(params.temperature), type(params.top_k), type(params.stop_token_ids[0])) == (float, int, int)
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=numpy.bool_(True))  # pyright: ignore[reportArgumentType]


def test_a_value_is_frozen_and_keeps_its_own_copy_of_the_bias() -> None:
    bias = {9: 1.0, 2: 3.0}
    params = SamplingParams(logit_bias=bias)
    bias[9] = 7.0
    assert params.logit_bias is not None
    assert list(params.logit_bias.items()) == [(2, 3.0), (9, 1.0)]
    assert copy.deepcopy(params) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_min_tokens_is_free_when_nothing_limits_the_output() -> None:
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    SamplingParams(stop_token_ids=(99,), logit_bias={99: 1.0}).check_vocab(100)
    rule = r"token ids must be below the vocabulary size \(100\), for example 99"
    with pytest.raises(RequestError, match=rf"^stop_token_ids = 100: {rule}$"):
        SamplingParams(stop_token_ids=(3, 100)).check_vocab(100)
    with pytest.raises(RequestError, match=rf"^logit_bias = 100: {rule}$"):
        SamplingParams(logit_bias={3: 1.0, 100: 1.0}).check_vocab(100)


@pytest.mark.parametrize(("field", "words"), [("stop", "stop strings are not built"), ("n", "several answers")])
def test_what_other_engines_have_and_this_one_has_not_is_said_in_words(field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams.from_dict({field: 2})
