"""Configuration files: the published ones plan with their published sizes or are refused by field; changed ones too."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_mla import RopeConfig, YarnScaling
from runtime.model.model_config import ModelConfig, parse_model_config, read_model_config
from runtime.model.model_shapes import parameter_counts, shared_tensors, total
from runtime.model.quant_fields import Fp8BlockQuant
from tests.runtime.checkpoints import SMALL, names_and_shapes

CONFIGS = Path(__file__).parents[1] / "configs"
PROFILES = Path(__file__).parents[3] / "profiles" / "models"

# File, profile of the same model, billions of parameters of the main model, of the layers for multi-token prediction.
PLANNED = [
    ("deepseek-v2-lite", "deepseek-v2-lite", 15.706, 0.0),
    ("deepseek-v2", "deepseek-v2", 235.741, 0.0),
    ("deepseek-v3", "deepseek-v3", 671.026, 13.463),
    ("kimi-k2-instruct", "kimi-k2", 1026.408, 0.0),
    ("moonlight-16b-a3b", "moonlight-16b-a3b", 15.960, 0.0),
    ("glm-4.7-flash", "glm-4.7-flash", 29.943, 1.278),
]
REFUSED = [
    ("deepseek-v3.2", r"index_topk is 2048; sparse attention with an indexer \(DSA\) is not built"),
    ("glm-5", r"index_topk is 2048; sparse attention with an indexer \(DSA\) is not built"),
    ("deepseek-v4-flash", "hc_mult is 4; hyper-connections are not built"),
    ("deepseek-v4-flash", "model_type is 'deepseek_v4'"),
    ("deepseek-vl2-tiny", "language_config.use_mla is False; attention without a latent is not built"),
    ("kimi-k2.5", "text_config.quantization_config.quant_method is 'compressed-tensors'; INT4 experts are not built"),
]


def load(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def changed(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(base | changes)


def without(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name not in names}


@pytest.mark.parametrize(("name", "profile", "main", "mtp"), PLANNED)
def test_a_published_config_has_its_published_parameter_count(name: str, profile: str, main: float, mtp: float) -> None:
    counts = parameter_counts(read_model_config(CONFIGS / f"{name}.json"))
    assert round(counts.main / 1e9, 3) == main
    assert round(counts.mtp / 1e9, 3) == mtp


@pytest.mark.parametrize(("name", "profile", "main", "mtp"), PLANNED)
def test_a_profile_is_the_published_model(name: str, profile: str, main: float, mtp: float) -> None:
    assert read_model_config(PROFILES / f"{profile}.json") == read_model_config(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(("name", "profile", "main", "mtp"), PLANNED)
def test_a_published_config_gives_no_warning(name: str, profile: str, main: float, mtp: float) -> None:
    assert read_model_config(CONFIGS / f"{name}.json").warnings == ()


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_an_unbuilt_model_is_refused_by_field(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_model_config(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3", 0.135234),
        ("deepseek-v2-lite", 0.114721),
        ("deepseek-v2", 0.114721),
        ("kimi-k2-instruct", 0.130861),
        ("glm-4.7-flash", 0.0625),
        ("moonlight-16b-a3b", 0.0721688),
    ],
)
def test_softmax_scales_are_the_known_ones(name: str, scale: float) -> None:
    assert math.isclose(read_model_config(CONFIGS / f"{name}.json").mla.softmax_scale, scale, rel_tol=5e-6)


def test_latent_norms_keep_their_own_eps() -> None:
    model = read_model_config(CONFIGS / "moonlight-16b-a3b.json")
    assert (model.rms_norm_eps, model.mla.latent_norm_eps) == (1e-5, 1e-6)


def test_the_bundled_checkpoint_is_understood() -> None:
    model = read_model_config(PROFILES / "tiny-v3")
    assert (model.num_layers, model.num_dense_layers, model.num_mtp_layers) == (4, 1, 1)
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.num_groups, model.moe.topk_groups) == (32, 4, 2)
    assert (model.eos_token_ids, model.bos_token_id, model.dtype, model.warnings) == ((1,), 0, torch.bfloat16, ())


def test_counts_agree_with_a_plain_list_of_tensors() -> None:
    model = parse_model_config(SMALL)
    names = names_and_shapes(SMALL)
    assert parameter_counts(model).main == sum(math.prod(shape) for shape in names.values())
    alike = {name: shape for name, shape in names.items() if ".mlp.experts." not in name}
    assert shared_tensors(model) == alike
    assert total(alike) == parameter_counts(model).main - parameter_counts(model).experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func is 'sqrtsoftplus'; what is built is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; what is built is 'noaux_tc'"),
        (
            {"attention_bias": True},
            "attention_bias is True; biases on attention projections are not built; it must be false",
        ),
        ({"mlp_bias": True}, "mlp_bias is True; biases on MLP projections are not built; it must be false"),
        ({"hidden_act": "situ"}, "hidden_act is 'situ'; other activations are not built; it must be \"silu\""),
        (
            {"moe_layer_freq": 2},
            "moe_layer_freq is 2; experts in every layer past the dense ones is what is built; it must be 1",
        ),
        (
            {"num_key_value_heads": 1},
            "num_key_value_heads is 1; MLA has as many key heads as query heads; it must be 2",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; rotary positions on a part of the rotary width are not built; "
            "it must be 1.0",
        ),
        (
            {"kv_lora_rank": None},
            "kv_lora_rank is None; attention without a latent is not built; MLA files state a rank, e.g. 512",
        ),
        ({"use_mla": False}, "use_mla is False; attention without a latent is not built"),
        ({"qk_head_dim": 99}, "qk_head_dim is 99; it is qk_nope_head_dim + qk_rope_head_dim; it must be 24"),
        ({"num_experts": 7}, "num_experts is 7; it stands beside n_routed_experts and must agree; it must be 6"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7; it must be at most n_routed_experts, 6"),
        ({"n_group": 4}, "n_group is 4; it must divide n_routed_experts, 6, e.g. 3"),
        ({"n_group": 6}, "n_group is 6; a group's score is the sum of its two best; at most 3 groups fit"),
        ({"n_group": 3, "topk_group": 4}, "topk_group is 4; it must be at most n_group, 3"),
        (
            {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3},
            "topk_group is 1; 1 groups of 2 hold fewer than the 3 experts a token needs; it must be at least 2",
        ),
        ({"n_group": None}, "n_group is None; it must be a whole number of at least 1, e.g. 1"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be a number above 0, e.g. 1"),
        ({"hidden_size": "160"}, "hidden_size is '160'; it must be a whole number of at least 1, e.g. 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        (
            {"moe_router_dtype": "bfloat16"},
            "moe_router_dtype is 'bfloat16'; the router runs in float32 or wider; it must be \"float32\"",
        ),
        (
            {"layer_types": ["linear_attention"]},
            "layer_types is ['linear_attention']; layers other than full_attention are not built",
        ),
        (
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            'it must be 3 layers, "dense" ones first, then "sparse" ones',
        ),
        (
            {"mlp_layer_types": ["dense", "dense", "sparse"]},
            "first_k_dense_replace is 1; mlp_layer_types says otherwise; the two must agree; it must be 2",
        ),
        (
            {"num_mtp_layers": 2, "num_nextn_predict_layers": 1},
            "num_mtp_layers is 2; num_nextn_predict_layers says 1; the two must agree",
        ),
        ({"index_topk": 64}, "index_topk is 64; sparse attention with an indexer (DSA) is not built"),
        ({"sliding_window": 128}, "sliding_window is 128; windowed attention is not built"),
        ({"scale_emb": 12}, "scale_emb is 12; scaled embeddings are not built"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id or a list of them, e.g. 1"),
        ({"dtype": "float32"}, "torch_dtype is 'bfloat16'; dtype says 'float32'; the two must agree, or one must go"),
        (
            {"torch_dtype": "float8"},
            "torch_dtype is 'float8'; what is built is 'bfloat16', 'float16', 'float32', 'float64'",
        ),
    ],
)
def test_a_field_that_is_not_built_is_refused_in_words(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(SMALL, **changes)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'; what is built is fp8 e4m3"),
        ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "quantization_config.weight_block_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [32, 32]}, "weight_block_size is [32, 32]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e3"},
            "scale_fmt is 'e3'; what is built",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_method is 'modelopt'; NVFP4 weights are not built",
        ),
        ({"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'; what is built is fp8 e4m3"),
        ("fp8", "quantization_config is 'fp8'; it must be null or an object"),
    ],
)
def test_a_quantisation_that_is_not_built_is_refused_in_words(quantization: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(SMALL, quantization_config=quantization)


def test_fp8_blocks_are_read_with_their_scale_format() -> None:
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert changed(SMALL, quantization_config=fp8).quantization == Fp8BlockQuant()
    with_list = fp8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    assert changed(SMALL, quantization_config=with_list).quantization == Fp8BlockQuant(scale_fmt="ue8m0")


def test_a_hidden_nvfp4_file_is_found_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    with pytest.raises(ValueError, match=r"hf_quant_config.json: quantization.quant_algo is 'NVFP4'; NVFP4 weights"):
        read_model_config(tmp_path)


def test_a_wrapped_language_model_is_read_without_a_warning() -> None:
    data = load("kimi-k2.5")
    data["text_config"] = without(data["text_config"], "quantization_config")
    model = parse_model_config(data)
    assert (model.model_type, model.num_layers, model.rms_norm_eps, model.warnings) == ("kimi_k2", 61, 1e-5, ())
    assert model.mla.rope.scaling == YarnScaling(
        factor=64.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    )


def test_quantisation_on_top_of_a_wrapper_is_seen() -> None:
    data = load("kimi-k2.5")
    data["quantization_config"] = data["text_config"].pop("quantization_config")
    with pytest.raises(ValueError, match=r"quantization_config\.quant_method is 'compressed-tensors'; INT4 experts"):
        parse_model_config(data)


def test_a_wrapper_that_ties_otherwise_is_refused() -> None:
    data = {"model_type": "kimi_k25", "text_config": SMALL, "tie_word_embeddings": True}
    with pytest.raises(ValueError, match="tie_word_embeddings is True; the language model's own field says otherwise"):
        parse_model_config(data)
    assert parse_model_config(data | {"tie_word_embeddings": False}) == parse_model_config(SMALL)


def test_an_absent_query_rank_is_the_class_default_and_null_means_none() -> None:
    assert parse_model_config(without(SMALL, "q_lora_rank")).mla.q_lora_rank == 1536
    assert parse_model_config(without(load("glm-4.7-flash"), "q_lora_rank")).mla.q_lora_rank == 768
    assert changed(SMALL, q_lora_rank=None).mla.q_lora_rank is None


def test_glm_has_its_class_defaults() -> None:
    full = load("glm-4.7-flash")
    bare = without(
        full, "topk_method", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps",
        "first_k_dense_replace", "attention_bias", "hidden_act", "partial_rotary_factor", "rope_scaling",
    )  # fmt: skip
    assert parse_model_config(bare) == parse_model_config(full)
    assert parse_model_config(bare).moe.scoring == "sigmoid"  # type: ignore[union-attr]


def test_glm_takes_its_dense_layers_from_mlp_layer_types_only() -> None:
    full = load("glm-4.7-flash")
    with pytest.raises(ValueError, match="first_k_dense_replace is 2; glm4_moe_lite has one dense layer unless"):
        changed(full, first_k_dense_replace=2)
    kinds = ["dense"] * 3 + ["sparse"] * 44
    assert changed(full, first_k_dense_replace=3, mlp_layer_types=kinds).num_dense_layers == 3


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="kv_lora_rank is missing; the file must state it"):
        parse_model_config(without(SMALL, "kv_lora_rank"))


def test_v2_is_softmax_without_renormalisation() -> None:
    lite = load("deepseek-v2-lite")
    with pytest.raises(ValueError, match="norm_topk_prob is True; softmax scores are not renormalised"):
        changed(lite, norm_topk_prob=True)
    with pytest.raises(ValueError, match="rope_interleave is False; deepseek_v2 has interleaved rotary pairs"):
        changed(lite, rope_interleave=False)
    assert parse_model_config(without(lite, "scoring_func")).moe == parse_model_config(lite).moe


def test_another_type_with_a_known_architecture_is_taken() -> None:
    model = changed(SMALL, model_type="some_finetune")
    assert (model.model_type, model.moe) == ("some_finetune", parse_model_config(SMALL).moe)
    with pytest.raises(ValueError, match=r"model_type is 'llama'.*any type whose architectures name"):
        changed(SMALL, model_type="llama", architectures=["LlamaForCausalLM"])


YARN = {
    "type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    old = changed(SMALL, rope_theta=50000.0, rope_scaling=YARN)
    new_spelling = without(YARN, "type") | {"rope_type": "yarn", "rope_theta": 50000.0}
    new = parse_model_config(without(SMALL, "rope_theta") | {"rope_parameters": new_spelling})
    both = changed(SMALL, rope_theta=50000.0, rope_scaling=YARN, rope_parameters=new_spelling | {"type": "yarn"})
    assert old.mla.rope == new.mla.rope == both.mla.rope
    assert old.mla.rope == RopeConfig(
        theta=50000.0,
        scaling=YarnScaling(
            factor=4.0, original_max_position=64, beta_fast=32.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=0.7
        ),
    )


def test_plain_rope_and_non_interleaved_pairs_are_read() -> None:
    new = {"rope_type": "default", "rope_theta": 1e6}
    assert parse_model_config(without(SMALL, "rope_theta") | {"rope_parameters": new}).mla.rope == RopeConfig(theta=1e6)
    assert changed(SMALL, rope_interleave=False).mla.rope == RopeConfig(theta=10000.0, interleaved=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"rope_theta": 5e4}},
            "rope_theta is 10000.0; rope_parameters.rope_theta says 50000.0; the two must agree",
        ),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "the two must agree, or one must go"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8}}, "the two must agree, or one must go"),
        (
            {"rope_scaling": YARN | {"rope_type": "default"}},
            "rope_scaling.type is 'yarn'; rope_type says 'default'; the two must agree",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; what is built is 'default', 'yarn'"),
        ({"rope_scaling": {"rope_type": "deepseek_yarn"}}, "rope_scaling.rope_type is 'deepseek_yarn'"),
        ({"rope_scaling": YARN | {"attention_factor": 1.2}}, "rope_scaling.attention_factor is 1.2"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate is False"),
        ({"rope_scaling": YARN | {"short_factor": [1]}}, "rope_scaling.short_factor is set; it has no meaning"),
        ({"rope_scaling": without(YARN, "factor")}, "rope_scaling.factor is missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be null or an object"),
    ],
)
def test_a_rope_that_is_not_clear_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(SMALL, **changes)


def test_ends_of_text_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"eos_token_id": [3, 5]}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9], "temperature": 0.3}')
    assert read_model_config(tmp_path).eos_token_ids == (3, 5, 9)


def test_an_end_of_text_outside_the_vocabulary_is_a_warning() -> None:
    model = changed(SMALL, eos_token_id=[1, 50])
    assert model.eos_token_ids == (1,)
    assert model.warnings == ("eos_token_id 50 is outside the vocabulary of 50 and is never sampled",)
    assert "only max_tokens" in changed(SMALL, eos_token_id=None).warnings[0]


def test_unknown_fields_are_named_in_a_warning_and_harmless_ones_are_not() -> None:
    model = changed(SMALL, head_dim=64, do_sample=True, seq_aux=True, brand_new=1, other=None)
    assert model.warnings == ("unknown fields, ignored: brand_new, other",)


def test_features_that_are_switched_off_are_accepted() -> None:
    off = {"use_mla": True, "sliding_window": None, "zero_expert_num": 0, "mla_use_nope": False, "scale_emb": 1}
    assert changed(SMALL, **off) == parse_model_config(SMALL)


def test_a_model_without_experts_is_all_dense() -> None:
    for changes in ({"n_routed_experts": None}, {"first_k_dense_replace": 3}):
        model = changed(SMALL, **changes)
        assert (model.moe, model.num_dense_layers, list(model.moe_layers)) == (None, 3, [])


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist; a model is a folder with config.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path / 'config.json'))} is not valid JSON"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("kind", ["v2", "v3", "glm"])
def test_a_config_saved_by_transformers_is_read(kind: str, tmp_path: Path) -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

    same = {name: SMALL[name] for name in SMALL if name not in ("architectures", "model_type", "torch_dtype")}
    same = without(same, "scoring_func", "topk_method", "moe_layer_freq", "rope_theta", "norm_topk_prob")
    rope = {"rope_type": "default", "rope_theta": 5e4}
    classes = {"v2": DeepseekV2Config, "v3": DeepseekV3Config, "glm": Glm4MoeLiteConfig}
    classes[kind](**same, rope_parameters=rope).save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    assert model.mla == changed(SMALL, rope_theta=5e4).mla
    assert model.moe is not None
    assert model.moe.scoring == ("softmax" if kind == "v2" else "sigmoid")
    assert (model.num_dense_layers, model.eos_token_ids, model.warnings) == (1, (1,), ())
