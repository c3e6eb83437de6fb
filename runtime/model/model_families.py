"""What the classes behind a `config.json` mean by a field that is absent, and which fields change the mathematics.

Tables only. The defaults are those of the Hugging Face `transformers` classes; sizes that every published file states
have none, so a file without them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Far past every published model (hundreds of layers and experts, a million positions); more is a mistake, or malice.
MOST_LAYERS = 1 << 10
MOST_EXPERTS = 1 << 14
MOST_TOKENS = 1 << 30

Scoring = Literal["softmax", "sigmoid"]
Method = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One router and its class defaults."""

    name: str
    scoring: Scoring
    methods: tuple[Method, ...]
    defaults: Mapping[str, Any]


_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "partial_rotary_factor": 1.0,
    "moe_layer_freq": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    scoring="softmax",
    methods=("greedy", "group_limited_greedy"),
    defaults=_COMMON
    | {
        "q_lora_rank": 1536,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-6,
    },
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    scoring="sigmoid",
    methods=("noaux_tc",),
    defaults=_COMMON
    | {
        "q_lora_rank": 1536,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "rms_norm_eps": 1e-6,
    },
)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    scoring="sigmoid",
    methods=("noaux_tc",),
    defaults=_COMMON
    | {
        "q_lora_rank": 768,
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
    },
)

BY_MODEL_TYPE = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
}
BY_ARCHITECTURE = {"DeepseekV2ForCausalLM": DEEPSEEK_V2, "DeepseekV3ForCausalLM": DEEPSEEK_V3}

# A field of a neighbouring family, and what it would change. Values that switch the feature off are accepted.
UNBUILT: dict[str, str] = {
    "index_topk": "sparse attention with an indexer (DSA) is not built",
    "index_n_heads": "sparse attention with an indexer (DSA) is not built",
    "index_head_dim": "sparse attention with an indexer (DSA) is not built",
    "indexer_types": "sparse attention with an indexer (DSA) is not built",
    "mla_use_nope": "latent attention without rotary positions is not built",
    "mla_use_output_gate": "an output gate on attention is not built",
    "linear_attn_config": "linear attention is not built",
    "zero_expert_num": "zero-computation experts are not built",
    "hc_mult": "hyper-connections are not built",
    "swiglu_limit": "a clamped SwiGLU is not built",
    "compress_ratios": "compressed attention is not built",
    "num_hash_layers": "routing by token id is not built",
    "sliding_window": "windowed attention is not built",
    "o_lora_rank": "a low-rank output projection is not built",
    "routed_expert_hidden_size": "experts on a projection of their own are not built",
    "activation_situ_beta": "the situ activation is not built",
    "attn_res_block_size": "attention over earlier layers is not built",
    "scale_emb": "scaled embeddings are not built",
    "scale_depth": "scaled residuals are not built",
    "llama_4_scaling_beta": "a query scale that grows with the position is not built",
    "engram_layers": "engram layers are not built",
}

# Fields that change no number of a decode: provenance, training, and the defaults of base classes. Sampling defaults
# (temperature, top_k, ...) stand here because a request brings its own; `head_dim` because files disagree about it.
_HARMLESS = """
    auto_map architectures transformers_version _name_or_path _attn_implementation attn_implementation
    initializer_range attention_dropout aux_loss_alpha router_aux_loss_coef seq_aux ep_size pretraining_tp use_cache
    pad_token_id head_dim output_router_logits
    add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder
    is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    typical_p use_bfloat16
    index_topk_freq index_skip_topk_offset index_topk_pattern index_share_for_mtp_iteration indexer_rope_interleave
"""
HARMLESS = frozenset(_HARMLESS.split())

# Beside an inner `text_config` stands what belongs to pictures and video.
_HARMLESS_WRAPPER = """
    model_type vision_config projector_config ignore_index media_placeholder_token_id use_unified_vision_chunk
    video_placeholder candidate_resolutions global_view_pos tile_tag bos_token_id
"""
HARMLESS_WRAPPER = HARMLESS | frozenset(_HARMLESS_WRAPPER.split())
