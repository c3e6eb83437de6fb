"""What weights take a second time where kernels of a processor read packed copies (see `ep.cpu.panels`).

Copied is what is multiplied with rows: not norms, and not the router, which is wide.
"""

from attention_mla import MlaConfig, down_names, mla_shapes
from ep.cpu.panels import packed_bytes

from ..model.model_config import ModelConfig

__all__ = ["packed_weight_bytes"]


def packed_weight_bytes(model: ModelConfig, slots: int) -> int:
    """Bytes of all copies on a rank with so many expert slots."""
    moe = model.moe
    head = packed_bytes(model.vocab_size, model.hidden_size)
    dense = model.num_dense_layers * _mlp_bytes(model.hidden_size, model.dense_intermediate_size)
    attention = model.num_layers * _attention_bytes(model.mla)
    if moe is None:
        return head + attention + dense
    routed = slots * _mlp_bytes(moe.hidden_size, moe.intermediate_size)
    shared = _mlp_bytes(moe.hidden_size, moe.shared_intermediate_size) if moe.num_shared else 0
    return head + attention + dense + len(model.moe_layers) * (routed + shared)


def _attention_bytes(config: MlaConfig) -> int:
    """kv_b's halves are copied by head; long prompts read it as it is."""
    shapes = mla_shapes(config)
    down = sum(shapes[name][0] for name in down_names(config))
    others = [shapes[name] for name in ("q_b_proj.weight", "o_proj.weight") if name in shapes]
    halves = [(config.kv_lora_rank, config.qk_nope_head_dim), (config.v_head_dim, config.kv_lora_rank)]
    matrices = [(down, config.hidden_size), *others, *halves * config.num_heads]
    return sum([packed_bytes(*shape) for shape in matrices])


def _mlp_bytes(hidden: int, intermediate: int) -> int:
    return packed_bytes(intermediate, hidden, gated=True) + packed_bytes(hidden, intermediate)
