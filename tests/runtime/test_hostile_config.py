"""Configuration files that nobody meant well: whatever stands in them, the answer is a model or a refusal in words."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from runtime.model.config_fields import shown
from runtime.model.model_config import parse_model_config, read_model_config
from runtime.model.model_shapes import parameter_counts
from tests.runtime.checkpoints import SMALL
from tests.runtime.model.test_model_config import YARN, without

HUGE = 10**400
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = [
    None, True, False, 0, -1, 5, 1.5, 10**7, 10**30, HUGE, -HUGE, 1e308, float("inf"), float("nan"), "", "x",
    "x" * 10**6, [], [1], [["a"]], ["a", 1], [{}], {}, {"a": 1}, {"a": {"weights": [1]}}, {"weights": {"type": []}},
    {"a": {"weights": {"num_bits": [4]}}}, nested(10**5), list(range(10**5)),
]  # fmt: skip
EXTRA = (
    "layer_types", "mlp_layer_types", "quantization_config", "rope_scaling", "rope_parameters", "text_config",
    "language_config", "qk_head_dim", "use_mla", "mlp_bias", "attention_bias", "moe_layer_freq", "moe_router_dtype",
    "num_experts", "num_local_experts", "num_nextn_predict_layers", "num_mtp_layers", "rope_interleave",
    "partial_rotary_factor", "dtype", "index_topk", "scale_emb", "sliding_window",
)  # fmt: skip
IN_QUANT = ("quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "config_groups", "quant_algo")
IN_ROPE = (*YARN, "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor", "truncate")
CONFIGS = {
    **{name: (lambda value, name=name: SMALL | {name: value}) for name in (*SMALL, *EXTRA)},
    **{f"other.{name}": (lambda value, name=name: SMALL | {"quantization_config": {name: value}}) for name in IN_QUANT},
    **{f"fp8.{name}": (lambda v, name=name: SMALL | {"quantization_config": FP8 | {name: v}}) for name in IN_QUANT},
    **{f"rope_scaling.{name}": (lambda v, name=name: SMALL | {"rope_scaling": YARN | {name: v}}) for name in IN_ROPE},
    **{f"rope_parameters.{n}": (lambda v, n=n: SMALL | {"rope_parameters": YARN | {n: v}}) for n in IN_ROPE},
    **{f"text_config.{n}": (lambda v, n=n: {"text_config": SMALL | {n: v}, n: v}) for n in ("dtype", "model_type")},
}


def answer(config: dict[str, Any]) -> str:
    """The refusal of a config, "" for one that is a model."""
    try:
        parameter_counts(parse_model_config(config))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CONFIGS)
def test_any_value_in_any_field_gives_a_model_or_a_short_refusal(name: str) -> None:
    for value in HOSTILE:
        start = time.process_time()
        refusal = answer(CONFIGS[name](value))
        assert all(len(line) < 600 for line in refusal.splitlines()), refusal[:1000]
        assert time.process_time() - start < 1.0, shown(value)


WHOLE_NUMBERS = [
    name for name, value in SMALL.items() if type(value) is int and name not in ("num_key_value_heads", "eos_token_id")
]


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [10**30, HUGE, 1e300], ids=["30 digits", "400 digits", "1e300"])
def test_every_whole_number_has_an_upper_bound(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is 1e?\+?[0.]*\d+.*; it must be at most \d+, e\.g\. \d+$"):
        parse_model_config(SMALL | {name: value})


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "routed_scaling_factor"])
def test_every_number_has_an_upper_bound(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is 10000000.*00000; it must be at most \S+, e\.g\. \S+$"):
        parse_model_config(SMALL | {name: HUGE})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": [["a"]]}, "model_type is [['a']]; it must be a word, e.g. \"deepseek_v3\""),
        ({"architectures": 5}, 'architectures is 5; it must be a list of words, e.g. ["DeepseekV3ForCausalLM"]'),
        ({"architectures": [["a"]]}, "architectures is [['a']]; it must be a list of words"),
        ({"layer_types": 5}, "layer_types is 5; layers other than full_attention are not built"),
        ({"layer_types": [["a"]]}, "layer_types is [['a']]; layers other than full_attention are not built"),
        ({"mlp_layer_types": 5}, 'mlp_layer_types is 5; it must be 3 layers, "dense" ones first, then "sparse" ones'),
        ({"quantization_config": {"config_groups": [1]}}, "quantization_config.quant_method is None; what is built is"),
        ({"quantization_config": {"config_groups": {"a": 1}}}, "quantization_config.quant_method is None; what is"),
        ({"n_group": 7 * 10**5}, "n_group is 700000; it must divide n_routed_experts, 6, e.g. 6"),
        ({"n_routed_experts": 10**7}, "n_routed_experts is 10000000; it must be at most 16384, e.g. 16384"),
        ({"text_config": 5}, "text_config is 5; it must be an object, or absent"),
        ({"text_config": {}, "language_config": {}}, "language_config stands beside text_config; one must go"),
        ({"attention_bias": 0}, "attention_bias is 0; biases on attention projections are not built; it must be false"),
        ({"moe_layer_freq": True}, "moe_layer_freq is True; experts in every layer past the dense ones"),
        ({"eos_token_id": HUGE}, "; it must be a token id or a list of them, e.g. 1"),
        ({"hidden_act": "x" * 10**5}, "...xxxxxxxxxxxxxxxxxxxxxxxxxxxx'; other activations are not built"),
    ],
)
def test_a_hostile_value_is_refused_with_field_value_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_model_config(SMALL | changes)


def test_an_unknown_scoring_function_is_refused_in_these_words() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_model_config(SMALL | {"scoring_func": "sqrtsoftplus"})
    assert str(caught.value) == "scoring_func is 'sqrtsoftplus'; what is built is 'sigmoid'"


def test_a_null_model_type_with_a_known_architecture_is_named_after_its_family() -> None:
    assert parse_model_config(SMALL | {"model_type": None}).model_type == "deepseek_v3"


def test_the_rotary_base_may_stand_in_the_old_object_too() -> None:
    bare = without(SMALL, "rope_theta")
    for scaling in ({"rope_theta": 5e4}, YARN | {"rope_theta": 5e4}):
        assert parse_model_config(bare | {"rope_scaling": scaling}).mla.rope.theta == 5e4
        assert parse_model_config(SMALL | {"rope_theta": 5e4, "rope_scaling": scaling}).mla.rope.theta == 5e4
        new = {"rope_scaling": scaling, "rope_parameters": scaling}
        assert parse_model_config(bare | new).mla.rope.theta == 5e4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_theta": 5e4}},
            "rope_theta is 10000.0; rope_scaling.rope_theta says 50000.0; the two must agree, or one must go",
        ),
        (
            {"rope_theta": 6e4, "rope_scaling": {"rope_theta": 5e4}, "rope_parameters": {"rope_theta": 6e4}},
            "rope_theta is 60000.0; rope_scaling.rope_theta says 50000.0; the two must agree, or one must go",
        ),
    ],
)
def test_rotary_bases_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_model_config(SMALL | changes)
    assert str(caught.value) == message


def test_rotary_bases_of_the_two_objects_must_agree() -> None:
    two = {"rope_scaling": {"rope_theta": 5e4}, "rope_parameters": {"rope_theta": 6e4}}
    with pytest.raises(
        ValueError, match=r"^rope_scaling.rope_theta is 50000.0; rope_parameters.rope_theta says 60000.0; the two must"
    ):
        parse_model_config(without(SMALL, "rope_theta") | two)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"[]", "holds list; it must hold an object"),
        (b'"x"', "holds str; it must hold an object"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b'{"a": "\xff"}', "is not valid JSON: the text is not UTF-8: 'utf-8' codec can't decode byte 0xff"),
        ("{}".encode("utf-16"), "is not valid JSON: the text is not UTF-8"),
        (b"[" * 200_000, "is not valid JSON: it is nested too deeply"),
        (b'{"a":' * 200_000, "is not valid JSON: it is nested too deeply"),
        (b'{"a": %s}' % (b"1" * 5000), "is not valid JSON: Exceeds the limit"),
        (b'{"n_group": 1, "n_group": 2}', "is not valid JSON: 'n_group' stands there twice, as 1 and as 2"),
    ],
    ids=["list", "word", "cut", "latin", "utf-16", "deep lists", "deep objects", "long number", "twice"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, name: str, text: bytes, problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name} {problem}")) as caught:
        read_model_config(tmp_path)
    assert len(str(caught.value)) < 600


def test_a_key_that_stands_twice_with_one_value_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 160, ' + json.dumps(SMALL)[1:])
    assert read_model_config(tmp_path) == parse_model_config(SMALL)


def test_a_quantisation_file_without_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    file = tmp_path / "hf_quant_config.json"
    file.write_text('{"quantization": "x"}')
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: quantization is 'x'; it must be null or an object"):
        read_model_config(tmp_path)
    for harmless in ("{}", '{"quantization": null}', '{"quantization": {"quant_algo": null}}'):
        file.write_text(harmless)
        assert read_model_config(tmp_path) == parse_model_config(SMALL)


def test_a_wrong_end_of_text_is_laid_to_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is '</s>'; it must be a token id"):
        read_model_config(tmp_path)


def test_unknown_fields_of_any_number_and_length_make_one_short_line() -> None:
    config = SMALL | {"x" * 10**6: 1} | {f"field_{number}": 1 for number in range(1000)}
    [warning] = parse_model_config(config).warnings
    assert warning.endswith("field_18, and 981 more")
    assert len(warning) < 600
    with pytest.raises(ValueError, match=r"^rope_scaling\.xxx.* is set; it has no meaning") as caught:
        parse_model_config(SMALL | {"rope_scaling": YARN | {"x" * 10**6: 1}})
    assert len(str(caught.value)) < 600


def test_long_values_are_cut_in_the_middle_and_short_ones_are_whole() -> None:
    assert shown([128, 128]) == "[128, 128]"
    assert shown("sqrtsoftplus") == "'sqrtsoftplus'"
    assert len(shown(HUGE)) <= 100
    assert shown("x" * 1000).startswith("'xxxxxxxx")
    assert len(shown([["x" * 1000] * 1000] * 1000)) <= 100
    assert len(shown(nested(10**5))) <= 100
