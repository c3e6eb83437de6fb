"""The rotary embedding of a config file, in the old spelling and in the new one, as one `RopeConfig`.

    old   rope_theta: 10000, rope_scaling: null or {"type": "yarn", "factor": 40, ...}, with or without a rope_theta
    new   rope_parameters: {"rope_type": "yarn" or "default", "rope_theta": 10000, "factor": 40, ...}

Files exist with either and with both; both present must say the same. Does not know what the numbers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attention_mla import RopeConfig, YarnScaling

from .config_fields import Fields, shown
from .model_families import MOST_TOKENS

_DEFAULT_THETA = 10000.0


def read_rope(fields: Fields) -> RopeConfig:
    """Read rope_theta, rope_scaling, rope_parameters, rope_interleave and partial_rotary_factor.

    Raises ValueError naming the field when the two spellings differ or the type is neither default nor YaRN.
    """
    fields.require("partial_rotary_factor", 1.0, "rotary positions on a part of the rotary width are not built")
    interleaved = fields.boolean("rope_interleave")
    old, new = _mapping(fields, "rope_scaling"), _mapping(fields, "rope_parameters")
    older_fields = Fields(old or {}, where=fields.full_name("rope_scaling."))
    newer_fields = Fields(new or {}, where=fields.full_name("rope_parameters."))
    theta = _theta([fields, older_fields, newer_fields])
    scaling = _scaling(older_fields)
    if new is not None:
        newer = _scaling(newer_fields)
        if old is not None and newer != scaling:
            fields.refuse("rope_scaling", f"rope_parameters says {shown(new)}; the two must agree, or one must go")
        scaling = newer
    return RopeConfig(theta=theta, interleaved=interleaved, scaling=scaling)


def _mapping(fields: Fields, name: str) -> Mapping[str, Any] | None:
    value = fields.get(name, None)
    if value is not None and not isinstance(value, Mapping):
        fields.refuse(name, 'it must be null or an object such as {"type": "yarn", ...}')
    return value


def _theta(places: Sequence[Fields]) -> float:
    """The one base that all who state it agree on, `transformers`' own when nobody does.

    `transformers` lets the one in an object win over the one beside it, DeepSeek's own code does not read it: a file
    that gives two has no one meaning.
    """
    stated = [place for place in places if place.has("rope_theta")]
    if not stated:
        return places[0].number("rope_theta", _DEFAULT_THETA)
    first, *others = stated
    theta = first.number("rope_theta")
    for other in others:
        if other.number("rope_theta") != theta:
            name = other.full_name("rope_theta")
            first.refuse(
                "rope_theta", f"{name} says {shown(other.get('rope_theta'))}; the two must agree, or one must go"
            )
    return theta


def _scaling(rope: Fields) -> YarnScaling | None:
    """YaRN's numbers from one rope object, None for plain rotary positions."""
    rope.get("rope_theta", None)
    rope.require("partial_rotary_factor", 1.0, "rotary positions on a part of the rotary width are not built")
    rope_type = _rope_type(rope)
    scaling = _yarn(rope) if rope_type == "yarn" else None
    for name in rope.unread():
        said = shown(name)[1:-1]
        raise ValueError(f"{said} is set; it has no meaning that is built with rope type {rope_type!r}, leave it out")
    return scaling


def _rope_type(rope: Fields) -> str:
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.choice(name, ("default", "yarn"), "default")
    if rope.get("type", kind) != kind:
        rope.refuse("type", f"rope_type says {kind!r}; the two must agree, or one must go")
    return kind


def _yarn(rope: Fields) -> YarnScaling:
    rope.require("attention_factor", None, "an attention factor other than mscale's own is not built")
    rope.require("truncate", True, "a ramp without floor and ceil is not built")
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position=rope.integer("original_max_position_embeddings", high=MOST_TOKENS),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=_optional_number(rope, "mscale"),
        mscale_all_dim=_optional_number(rope, "mscale_all_dim"),
    )


def _optional_number(rope: Fields, name: str) -> float | None:
    """A number, None when absent or null."""
    return None if rope.get(name, None) is None else rope.number(name, above=-1.0)
