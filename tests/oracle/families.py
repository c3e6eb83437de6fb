"""The small models that the decode is held against: one `Family` per kind of published checkpoint.

A family is data: the `config.json` that the checkpoint will carry, in the spelling of the real model it stands for
(`torch_dtype` or `dtype`, `rope_scaling` or `rope_parameters`, keys left out where the real file leaves them out), how
its files are laid out, and the seed of its weights. It knows nothing of transformers or of our engine.

Why these numbers. Weights of std 0.1 at hidden 128 give logits and router scores of std near 1, so that greedy tokens
vary; at the usual 0.02 a fault changes no token. The correction bias has std 0.1 (0.2 ties experts, 0.02 decides
nothing). Head widths, ranks and expert widths all differ, so that no two axes can be exchanged unseen. `faults` names
the rules that this family alone or together with few others can show; test_checkpoints.py breaks each one in the oracle
and asks that tokens change.

Seeds are chosen, not arbitrary: in float32 two correct programs differ by about 1e-6 in a router's score, and where two
experts are closer than that they may choose differently. Each seed below keeps every choice of every decoded position
apart by at least `NEAR_TIE` (test_oracle.py checks it), so that equality is a fair demand.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PROMPT_LENGTHS = (1, 2, 17, 64, 65, 300)
NUM_TOKENS = 64
NEAR_TIE = 1e-5

Layout = Literal["single", "sharded", "fp8", "mtp", "stray_inv_freq", "wrapped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One kind of checkpoint: its config.json, its files, its seed.

    `oracle` names the transformers classes that compute it. `saved_config` True leaves the config.json that
    transformers writes instead of `config`. `bias_mean` moves the correction bias: well below zero the biased scores
    are negative, and a group mask of 0 would prefer masked experts.
    """

    name: str
    oracle: Literal["deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
    config: Mapping[str, Any]
    seed: int
    faults: tuple[str, ...]
    layout: Layout = "single"
    ranks: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    bias_mean: float = 0.0
    saved_config: bool = False
    text_config: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text_config", self.config.get("text_config", self.config))

    def prompts(self) -> list[list[int]]:
        """One prompt of random token ids per length of `PROMPT_LENGTHS`, the same in every run."""
        ids = random.Random(self.seed)
        return [[ids.randrange(self.text_config["vocab_size"]) for _ in range(length)] for length in PROMPT_LENGTHS]


WIDTHS = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 499,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
    "max_position_embeddings": 163840,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

DEEPSEEK_V2 = WIDTHS | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}

DEEPSEEK_V3 = WIDTHS | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
}

V2_LITE = Family(
    name="v2-lite",
    oracle="deepseek_v2",
    seed=1,
    dtype="bfloat16",
    faults=("plain softmax scale", "no shared experts", "normalised weights"),
    config=DEEPSEEK_V2
    | {
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
)

V2 = Family(
    name="v2",
    oracle="deepseek_v2",
    seed=5,
    ranks=3,
    faults=("no routed scaling", "no group limit", "group score of two", "plain softmax scale"),
    config=DEEPSEEK_V2
    | {
        "n_routed_experts": 40,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
    },
)

V3 = Family(
    name="v3",
    oracle="deepseek_v3",
    seed=21,
    ranks=4,
    layout="sharded",
    saved_config=True,
    faults=(
        "no correction bias",
        "biased weights",
        "no group limit",
        "group score of one",
        "weights not normalised",
        "no routed scaling",
        "rotary pairs the other way",
        "no shared experts",
    ),
    config=DEEPSEEK_V3 | {"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
)

K2 = Family(
    name="k2",
    oracle="deepseek_v3",
    seed=43,
    layout="stray_inv_freq",
    faults=("no correction bias", "no routed scaling", "plain softmax scale", "unscaled frequencies"),
    config=DEEPSEEK_V3
    | {
        "model_type": "kimi_k2",
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)

YARN_PAST_ITS_ORIGINAL_LENGTH = Family(
    name="yarn",
    oracle="deepseek_v3",
    seed=3,
    bias_mean=-1.0,
    faults=("masked groups score 0", "plain softmax scale", "cos and sin unscaled", "unscaled frequencies"),
    config=DEEPSEEK_V3
    | {
        "first_k_dense_replace": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
)

YARN_WITHOUT_MSCALE = Family(
    name="yarn-no-mscale",
    oracle="deepseek_v3",
    seed=5,
    faults=("cos and sin unscaled", "squared mscale in the softmax scale"),
    config=DEEPSEEK_V3
    | {
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
)

GLM = Family(
    name="glm",
    oracle="glm4_moe_lite",
    seed=5,
    layout="mtp",
    faults=("latent norms take rms_norm_eps", "no routed scaling", "no correction bias"),
    config={key: value for key, value in DEEPSEEK_V3.items() if key not in {"scoring_func", "bos_token_id"}}
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-2,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "num_nextn_predict_layers": 1,
        "eos_token_id": [1, 2, 3],
    },
)

FP8 = Family(
    name="fp8",
    oracle="deepseek_v3",
    seed=1,
    ranks=3,
    layout="fp8",
    faults=("no correction bias",),
    config=DEEPSEEK_V3
    | {
        "hidden_size": 200,
        "intermediate_size": 264,
        "moe_intermediate_size": 136,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 136,
        "kv_lora_rank": 72,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "n_routed_experts": 12,
        "n_group": 2,
        "topk_group": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    },
)

HALF_SPLIT_ROTARY = Family(
    name="half-split-rotary",
    oracle="deepseek_v3",
    seed=2,
    faults=("rotary pairs the other way",),
    config=DEEPSEEK_V3 | {"rope_interleave": False, "first_k_dense_replace": 0, "num_hidden_layers": 2},
)

TIED = Family(
    name="tied",
    oracle="deepseek_v3",
    seed=1,
    faults=("no routed scaling",),
    config=DEEPSEEK_V3 | {"tie_word_embeddings": True, "moe_intermediate_size": 64},
)

WRAPPED = Family(
    name="wrapped",
    oracle="deepseek_v3",
    seed=0,
    layout="wrapped",
    faults=("no correction bias",),
    config={
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "text_config": DEEPSEEK_V3
        | {"model_type": "kimi_k2", "num_hidden_layers": 2, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
        "vision_config": {"hidden_size": 8},
    },
)

FAMILIES = (
    V2_LITE,
    V2,
    V3,
    K2,
    YARN_PAST_ITS_ORIGINAL_LENGTH,
    YARN_WITHOUT_MSCALE,
    GLM,
    FP8,
    HALF_SPLIT_ROTARY,
    TIED,
    WRAPPED,
)
