"""A Hugging Face `config.json` as the numbers a decode needs: sizes, attention, router, ends of text.

Understands the MLA mixture-of-experts models that `model_families` lists. A field that would change the mathematics
and is not built is refused by name; an unknown one becomes a line in `ModelConfig.warnings`. Knows no tensors (see
`model_shapes`) and no ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_mla import MlaConfig
from moe import MoeConfig

from .config_fields import Fields, refuse, shown
from .json_file import read_json_object
from .model_families import (
    BY_ARCHITECTURE,
    BY_MODEL_TYPE,
    HARMLESS,
    HARMLESS_WRAPPER,
    MOST_LAYERS,
    MOST_TOKENS,
    UNBUILT,
    Family,
)
from .moe_fields import read_moe, read_num_dense_layers
from .quant_fields import Fp8BlockQuant, check_quant_file, read_quantization
from .rope_fields import read_rope

# q_a_layernorm and kv_a_layernorm use this whatever rms_norm_eps says, in `transformers` and in DeepSeek's own code.
LATENT_NORM_EPS = 1e-6

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_WRAPPERS = ("text_config", "language_config")
_ON_WRAPPER = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
_MOST_NAMED = 20
_SWITCHED_OFF = (None, False, 0, [], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model, complete.

    num_layers counts the main decoder; the first num_dense_layers of them have a dense MLP of width
    dense_intermediate_size, all others have experts (`moe` is None when there are none). num_mtp_layers are further
    layers for multi-token prediction, which are not run. max_position bounds the context. Any of eos_token_ids ends a
    text. quantization is what the file says; dtype is the number format of the weights that are not quantised.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_dense_layers: int
    dense_intermediate_size: int
    rms_norm_eps: float
    mla: MlaConfig
    moe: MoeConfig | None
    tie_word_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_mtp_layers: int
    quantization: Fp8BlockQuant | None
    dtype: torch.dtype
    warnings: tuple[str, ...]

    @property
    def moe_layers(self) -> range:
        """Indices of the layers that have experts."""
        return range(self.num_dense_layers, self.num_layers)


def read_model_config(path: Path | str) -> ModelConfig:
    """Read a checkpoint folder (config.json, with generation_config.json's ends of text) or a single .json file.

    Raises ValueError when the model is not one that is built, FileNotFoundError when there is no such file.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; a model is a folder with config.json, or a .json file")
    generation: Mapping[str, Any] = {}
    if path.is_dir():
        check_quant_file(path)
        beside = path / "generation_config.json"
        generation = read_json_object(beside) if beside.is_file() else {}
    data = read_json_object(file)
    try:
        return parse_model_config(data, generation=generation)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def parse_model_config(data: Mapping[str, Any], *, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The same from parsed JSON; `generation` is generation_config.json, of which only eos_token_id is used."""
    inner, where = _unwrap(data)
    family = _family(inner, where)
    fields = Fields(inner, defaults=family.defaults, where=where)
    _check_formulas(fields, family)
    num_layers = fields.integer("num_hidden_layers", high=MOST_LAYERS)
    hidden_size = fields.integer("hidden_size")
    moe = read_moe(fields, family, hidden_size)
    num_dense_layers = read_num_dense_layers(fields, family, num_layers) if moe is not None else num_layers
    vocab_size = fields.integer("vocab_size", high=MOST_TOKENS)
    ends_of_text = {"": data, where: inner, "generation_config.json: ": generation or {}}
    eos_token_ids, warnings = _read_eos(ends_of_text, vocab_size)
    fields.get("eos_token_id", None)
    return ModelConfig(
        model_type=fields.get("model_type", None) or family.name,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        num_dense_layers=num_dense_layers,
        dense_intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", high=1.0),
        mla=_read_mla(fields, hidden_size),
        moe=moe if num_dense_layers < num_layers else None,
        tie_word_embeddings=_read_tied(fields, data),
        max_position=fields.integer("max_position_embeddings", high=MOST_TOKENS),
        eos_token_ids=eos_token_ids,
        bos_token_id=fields.integer_or_none("bos_token_id", low=0, high=MOST_TOKENS),
        num_mtp_layers=_read_mtp(fields),
        quantization=_read_quantization(fields, data, wrapped=bool(where)),
        dtype=_read_dtype(fields, data),
        warnings=(*warnings, *_unknown(fields, data, wrapped=bool(where))),
    )


def _unwrap(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's own object inside a multimodal file, and its name."""
    stated = [name for name in _WRAPPERS if data.get(name) is not None]
    for name in stated:
        if not isinstance(data[name], Mapping):
            refuse(name, data[name], "it must be an object, or absent")
    if len(stated) > 1:
        raise ValueError(f"{stated[1]} stands beside {stated[0]}; one must go")
    return (data[stated[0]], f"{stated[0]}.") if stated else (data, "")


def _family(data: Mapping[str, Any], where: str) -> Family:
    """The router family; refuses at once everything that belongs to a neighbouring family, all of it by name."""
    reasons = [
        f"{where}{name} is {shown(data[name])}; {why}"
        for name, why in UNBUILT.items()
        if name in data and data[name] not in _SWITCHED_OFF and not (name == "scale_emb" and data[name] == 1)
    ]
    if data.get("use_mla", True) is not True:
        reasons.append(f"{where}use_mla is {shown(data['use_mla'])}; attention without a latent is not built")
    model_type, architectures = _names(data, where)
    family = BY_MODEL_TYPE.get(model_type or "")
    if family is None:
        family = next((BY_ARCHITECTURE[name] for name in architectures if name in BY_ARCHITECTURE), None)
    if family is None:
        known, classes = ", ".join(BY_MODEL_TYPE), " or ".join(BY_ARCHITECTURE)
        reasons.append(
            f"{where}model_type is {shown(model_type)} and architectures is {shown(architectures)}; built are {known}, "
            f"and any type whose architectures name {classes}"
        )
    if reasons or family is None:
        raise ValueError("\n".join(reasons))
    return family


def _names(data: Mapping[str, Any], where: str) -> tuple[str | None, list[str]]:
    """model_type and architectures, by which a family is known; either may be absent or null."""
    model_type, architectures = data.get("model_type"), data.get("architectures")
    if model_type is not None and not isinstance(model_type, str):
        refuse(f"{where}model_type", model_type, 'it must be a word, e.g. "deepseek_v3"')
    if architectures is not None and not _is_words(architectures):
        refuse(f"{where}architectures", architectures, 'it must be a list of words, e.g. ["DeepseekV3ForCausalLM"]')
    return model_type, architectures or []


def _is_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _check_formulas(fields: Fields, family: Family) -> None:
    """Fields that have one value in every model that is built."""
    fields.get("use_mla", True)
    for name in UNBUILT:
        fields.get(name, None)
    fields.require("hidden_act", "silu", "other activations are not built")
    fields.require("attention_bias", False, "biases on attention projections are not built")
    fields.require("mlp_bias", False, "biases on MLP projections are not built")
    fields.require("moe_layer_freq", 1, "experts in every layer past the dense ones is what is built")
    fields.require("moe_router_dtype", "float32", "the router runs in float32 or wider")
    heads = fields.integer("num_attention_heads")
    if fields.get("num_key_value_heads") is not None:
        fields.require("num_key_value_heads", heads, "MLA has as many key heads as query heads")
    kinds = fields.get("layer_types", None)
    if kinds is not None and not (_is_words(kinds) and set(kinds) == {"full_attention"}):
        fields.refuse("layer_types", "layers other than full_attention are not built")
    if family.name == "deepseek_v2":
        fields.require("rope_interleave", True, "deepseek_v2 has interleaved rotary pairs")


def _read_mla(fields: Fields, hidden_size: int) -> MlaConfig:
    if fields.get("kv_lora_rank") is None:
        fields.refuse("kv_lora_rank", "attention without a latent is not built; MLA files state a rank, e.g. 512")
    nope, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    fields.require("qk_head_dim", nope + rope_dim, "it is qk_nope_head_dim + qk_rope_head_dim")
    return MlaConfig(
        hidden_size=hidden_size,
        num_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer_or_none("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.integer("v_head_dim"),
        rope=read_rope(fields),
        latent_norm_eps=LATENT_NORM_EPS,
    )


def _read_tied(fields: Fields, data: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding; a wrapper that states it must agree."""
    tied = fields.boolean("tie_word_embeddings")
    Fields(data).require("tie_word_embeddings", tied, "the language model's own field says otherwise", default=tied)
    return tied


def _read_mtp(fields: Fields) -> int:
    """Layers past num_hidden_layers; a file need not have their tensors, and none is claimed when it says nothing."""
    other = fields.integer_or_none("num_mtp_layers", None, low=0, high=MOST_LAYERS)
    num_layers = fields.integer_or_none("num_nextn_predict_layers", other, low=0, high=MOST_LAYERS)
    if other is not None and other != num_layers:
        fields.refuse("num_mtp_layers", f"num_nextn_predict_layers says {num_layers}; the two must agree")
    return num_layers or 0


def _read_quantization(fields: Fields, data: Mapping[str, Any], *, wrapped: bool) -> Fp8BlockQuant | None:
    """It may stand inside the wrapper or on top; both must be readable, and the inner one counts."""
    inner = read_quantization(fields)
    outer = read_quantization(Fields(data)) if wrapped else None
    return inner or outer


def _read_dtype(fields: Fields, data: Mapping[str, Any]) -> torch.dtype:
    """`dtype` or `torch_dtype`, here or on the wrapper; bfloat16, which every published file says, when absent."""
    for where in (fields, Fields(data)):
        stated = [name for name in ("dtype", "torch_dtype") if where.get(name, None) is not None]
        names = {where.choice(name, tuple(_DTYPES)) for name in stated}
        if len(names) == 2:
            where.refuse("torch_dtype", f"dtype says {shown(where.get('dtype'))}; the two must agree, or one must go")
        if names:
            return _DTYPES[names.pop()]
    return torch.bfloat16


def _read_eos(sources: Mapping[str, Mapping[str, Any]], vocab_size: int) -> tuple[tuple[int, ...], list[str]]:
    """Every end of text that any of the files names, in their order; ids outside the vocabulary become a warning.

    sources: what goes before the field's name in an error -> the object that may have it.
    """
    found: dict[int, None] = {}
    for where, source in sources.items():
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < MOST_TOKENS:
                refuse(f"{where}eos_token_id", value, "it must be a token id or a list of them, e.g. 1")
            found[token] = None
    inside = tuple(token for token in found if token < vocab_size)
    outside = [token for token in found if token >= vocab_size]
    warnings = []
    if outside:
        names = str(outside[0]) if len(outside) == 1 else shown(outside)
        warnings.append(f"eos_token_id {names} is outside the vocabulary of {vocab_size} and is never sampled")
    if not inside:
        warnings.append("eos_token_id names no token: only max_tokens and stop_token_ids end a request")
    return inside, warnings


def _unknown(fields: Fields, data: Mapping[str, Any], *, wrapped: bool) -> list[str]:
    """One line naming the fields that nothing here understands, if there are any."""
    names = fields.unread(HARMLESS)
    if wrapped:
        outer = Fields(data)
        for name in (*_WRAPPERS, *_ON_WRAPPER):
            outer.get(name, None)
        names += outer.unread(HARMLESS_WRAPPER)
    said = [shown(name)[1:-1] for name in names[:_MOST_NAMED]]
    if len(names) > _MOST_NAMED:
        said.append(f"and {len(names) - _MOST_NAMED} more")
    return [f"unknown fields, ignored: {', '.join(said)}"] if said else []
