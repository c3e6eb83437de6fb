"""Weights of one rank: the right numbers in the right slots, and not a byte more than it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention_mla import Fp8Matrix
from ep import CheckpointError
from moe import ExpertPlacement, spread
from runtime.model.model_config import ModelConfig, parse_model_config
from runtime.weights.checkpoint import Checkpoint, open_checkpoint
from runtime.weights.dummy import DummyCheckpoint
from runtime.weights.weights import (
    DecoderWeights,
    bytes_to_read,
    held_tensors,
    load_banks,
    load_shared,
    verify_held,
)
from tests.runtime.checkpoints import EXPERT, SMALL, names_and_shapes, plain, random_tensors, write_checkpoint

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODEL = parse_model_config(SMALL)
PLAIN = random_tensors(SMALL)
QUANTIZED = random_tensors(SMALL, fp8=True)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path, SMALL, PLAIN, shards=4), MODEL)


@pytest.fixture
def fp8_source(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path / "fp8", SMALL, QUANTIZED, shards=4), MODEL)


def stacked(tensors: dict[str, Tensor], prefix: str, dtype: torch.dtype) -> Tensor:
    """Gate rows on top of up rows."""
    return torch.cat([plain(tensors, f"{prefix}{half}_proj.weight", dtype) for half in ("gate", "up")])


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_each_slot_of_each_rank_holds_its_expert(source: Checkpoint, num_ranks: int, dtype: torch.dtype) -> None:
    placement = spread(6, num_ranks)
    expected_rank = [rank for rank in range(num_ranks) for _ in range(6 // num_ranks + (rank < 6 % num_ranks))]
    seen = []
    for rank in range(num_ranks):
        banks = load_banks(source, MODEL, placement, rank=rank, dtype=dtype)
        assert banks[0] is None
        for slot, expert in enumerate(placement.experts_of(rank)):
            if expert == -1:
                continue
            seen.append(expert)
            assert expected_rank[expert] == rank
            for layer in (1, 2):
                bank = banks[layer]
                assert bank is not None
                prefix = f"model.layers.{layer}.mlp.experts.{expert}."
                assert torch.equal(bank.gate_up_L2FD[slot], stacked(PLAIN, prefix, dtype))
                assert torch.equal(bank.down_LDF[slot], plain(PLAIN, f"{prefix}down_proj.weight", dtype))
    assert seen == list(range(6))


def test_any_placement_with_copies_and_empty_slots_is_followed(source: Checkpoint) -> None:
    placement = ExpertPlacement(num_ranks=2, slots_per_rank=4, slot_experts=(5, 0, 3, -1, 2, 5, 1, 4))
    banks = load_banks(source, MODEL, placement, rank=1, dtype=torch.float32)
    bank = banks[2]
    assert bank is not None
    for slot, expert in enumerate((2, 5, 1, 4)):
        name = EXPERT.format(layer=2, expert=expert, proj="down")
        assert torch.equal(bank.down_LDF[slot], PLAIN[name].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fp8", [False, True])
def test_what_ranks_hold_alike_is_in_its_place(
    source: Checkpoint, fp8_source: Checkpoint, fp8: bool, dtype: torch.dtype
) -> None:
    tensors = QUANTIZED if fp8 else PLAIN
    shared = load_shared(fp8_source if fp8 else source, MODEL, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(shared.embed_VD, plain(tensors, "model.embed_tokens.weight", dtype))
    assert torch.equal(shared.head_VD, plain(tensors, "lm_head.weight", wide))
    assert torch.equal(shared.norm_D, plain(tensors, "model.norm.weight", dtype))
    first, last = shared.layers[0], shared.layers[2]
    assert first.gate_ED is first.shared is None
    assert last.dense is None
    assert first.dense is not None
    assert last.shared is not None
    assert torch.equal(first.dense.gate_up_2FD, stacked(tensors, "model.layers.0.mlp.", dtype))
    assert torch.equal(last.shared.gate_up_2FD, stacked(tensors, "model.layers.2.mlp.shared_experts.", dtype))
    at = "model.layers.2."
    assert torch.equal(last.shared.down_DF, plain(tensors, f"{at}mlp.shared_experts.down_proj.weight", dtype))
    assert torch.equal(last.input_norm_D, plain(tensors, f"{at}input_layernorm.weight", dtype))
    assert torch.equal(last.post_norm_D, plain(tensors, f"{at}post_attention_layernorm.weight", dtype))
    assert torch.equal(last.attention.o_DU, plain(tensors, f"{at}self_attn.o_proj.weight", dtype))
    assert torch.equal(last.attention.kv_b_UC, plain(tensors, f"{at}self_attn.kv_b_proj.weight", dtype))
    assert last.gate_ED is not None
    assert last.bias_E is not None
    assert torch.equal(last.gate_ED, plain(tensors, f"{at}mlp.gate.weight", wide))
    assert torch.equal(last.bias_E, plain(tensors, f"{at}mlp.gate.e_score_correction_bias", wide))


def test_fp8_experts_are_kept_or_dequantised_to_the_same_numbers(fp8_source: Checkpoint) -> None:
    placement = spread(6, 4)
    kept = load_banks(fp8_source, MODEL, placement, rank=1, dtype=torch.float32, keep_fp8=True)[1]
    wide = load_banks(fp8_source, MODEL, placement, rank=1, dtype=torch.float32)[1]
    assert kept is not None
    assert wide is not None
    assert (kept.gate_up_L2FD.dtype, wide.scales) == (torch.float8_e4m3fn, None)
    for slot, expert in enumerate(placement.experts_of(1)):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        gate_up_2FD, down_DF = kept.slot_weights(slot, torch.float32)
        assert torch.equal(gate_up_2FD, stacked(QUANTIZED, prefix, torch.float32))
        assert torch.equal(wide.gate_up_L2FD[slot], gate_up_2FD)
        assert torch.equal(wide.down_LDF[slot], down_DF)


def test_what_kernels_read_in_fp8_is_kept_as_the_file_has_it(tmp_path: Path) -> None:
    config = SMALL | {"q_lora_rank": 128}
    tensors, model = random_tensors(config, fp8=True), parse_model_config(config)
    source = open_checkpoint(write_checkpoint(tmp_path, config, tensors), model)
    kept = load_shared(source, model, dtype=torch.float32, keep_fp8=True).layers
    attention, shared, dense = kept[2].attention, kept[2].shared, kept[0].dense
    at = "model.layers.2.self_attn."

    def stored(*names: str) -> tuple[Tensor, Tensor]:
        values = torch.cat([tensors[name].view(torch.uint8) for name in names])
        return values, torch.cat([tensors[f"{name}_scale_inv"] for name in names])

    def assert_is(values: Tensor, scales: Tensor, *names: str) -> None:
        expected_values, expected_scales = stored(*names)
        assert torch.equal(values.view(torch.uint8), expected_values)
        assert torch.equal(scales, expected_scales)

    for matrix, names in (
        (attention.down_XD, ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")),
        (attention.q_b, ("q_b_proj.weight",)),
        (attention.o_DU, ("o_proj.weight",)),
    ):
        assert isinstance(matrix, Fp8Matrix)
        assert_is(matrix.values_ND, matrix.scales_QG, *[f"{at}{name}" for name in names])
    assert torch.equal(attention.kv_b_UC, plain(tensors, f"{at}kv_b_proj.weight", torch.float32))
    for mlp, prefix in ((shared, "model.layers.2.mlp.shared_experts."), (dense, "model.layers.0.mlp.")):
        assert mlp is not None
        assert mlp.scales is not None
        gate_up, down = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), f"{prefix}down_proj.weight"
        assert_is(mlp.gate_up_2FD, mlp.scales.gate_up_L2fd[0].flatten(0, 1), *gate_up)
        assert_is(mlp.down_DF, mlp.scales.down_Ldf[0], down)


def test_rows_that_do_not_end_with_a_block_are_not_stacked_in_fp8(fp8_source: Checkpoint) -> None:
    kept = load_shared(fp8_source, MODEL, dtype=torch.float32, keep_fp8=True).layers[1].attention
    wide = load_shared(fp8_source, MODEL, dtype=torch.float32).layers[1].attention
    assert isinstance(kept.down_XD, Tensor)  # q_lora_rank is 24
    assert torch.equal(kept.down_XD, wide.down_XD)
    assert isinstance(kept.o_DU, Fp8Matrix)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_rank_reads_exactly_the_bytes_of_what_it_holds(source: Checkpoint, num_ranks: int) -> None:
    placement = spread(6, num_ranks)
    held = held_tensors(MODEL, placement, 0)
    own_experts = {f".experts.{expert}." for expert in placement.experts_of(0)}
    expected = {
        name for name in names_and_shapes(SMALL)
        if ".experts." not in name or any(part in name for part in own_experts)
    }  # fmt: skip
    assert set(held) == expected
    reported: list[int] = []
    total = bytes_to_read(source, held)
    load_shared(source, MODEL, dtype=torch.float32, progress=reported.append)
    load_banks(source, MODEL, placement, rank=0, dtype=torch.float32, progress=reported.append)
    assert source.bytes_read == sum(reported) == total == sum(PLAIN[name].nbytes for name in expected)


def test_only_files_that_hold_something_of_this_rank_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, SMALL, PLAIN, shards=200)
    opened: set[str] = set()
    opener = Path.open

    def spy(self: Path, *args: str, **kwargs: int) -> object:
        opened.add(self.name)
        return opener(self, *args, **kwargs)

    source = open_checkpoint(tmp_path, MODEL)
    monkeypatch.setattr(Path, "open", spy)
    load_banks(source, MODEL, spread(6, 6), rank=3, dtype=torch.float32)
    assert len(opened) == 6  # three projections in each of two layers, each in a shard of its own


def test_a_joined_rank_shares_what_is_alike(source: Checkpoint) -> None:
    placement = spread(6, 2)
    shared = load_shared(source, MODEL, dtype=torch.float32)
    ranks = [
        DecoderWeights.join(shared, load_banks(source, MODEL, placement, rank=rank, dtype=torch.float32))
        for rank in range(2)
    ]
    assert ranks[0].embed_VD is ranks[1].embed_VD
    assert [layer.moe is None for layer in ranks[0].layers] == [True, False, False]
    banks = [layer.moe.bank for rank in ranks for layer in rank.layers if layer.moe is not None]
    assert len({bank.down_LDF.data_ptr() for bank in banks}) == 4


def test_nothing_is_read_when_another_rank_would_fail(tmp_path: Path) -> None:
    missing = EXPERT.format(layer=2, expert=5, proj="up")
    tensors = {name: tensor for name, tensor in PLAIN.items() if name != missing}
    source = open_checkpoint(write_checkpoint(tmp_path, SMALL, tensors), MODEL)
    with pytest.raises(CheckpointError, match=re.escape(missing)):
        verify_held(source, MODEL, spread(6, 2), ranks=range(2))
    with pytest.raises(CheckpointError, match=re.escape(missing)):
        load_banks(source, MODEL, spread(6, 2), rank=1, dtype=torch.float32)
    assert source.bytes_read == 0


def test_a_model_without_experts_has_no_banks(tmp_path: Path) -> None:
    config = SMALL | {"n_routed_experts": None, "first_k_dense_replace": 3}
    model = parse_model_config(config)
    source = DummyCheckpoint(model)
    verify_held(source, model, None, ranks=[0])
    banks = load_banks(source, model, None, rank=0, dtype=torch.float32)
    weights = DecoderWeights.join(load_shared(source, model, dtype=torch.float32), banks)
    assert all(layer.moe is None and layer.dense is not None for layer in weights.layers)


def dummy_downs(model: ModelConfig, num_ranks: int, *, seed: int = 0, keep_fp8: bool = False) -> list[Tensor]:
    """The down projections of layer 1 in expert order, as `num_ranks` ranks hold them."""
    placement = spread(6, num_ranks)
    out: list[Tensor] = []
    for rank in range(num_ranks):
        source = DummyCheckpoint(model, seed=seed)
        bank = load_banks(source, model, placement, rank=rank, dtype=torch.float32, keep_fp8=keep_fp8)[1]
        assert bank is not None
        held = sum(expert != -1 for expert in placement.experts_of(rank))
        out += [bank.slot_weights(slot, torch.float32)[1] for slot in range(held)]
    return out


def test_dummy_weights_are_the_same_for_any_number_of_ranks_and_differ_by_seed_and_name() -> None:
    one, three = dummy_downs(MODEL, 1), dummy_downs(MODEL, 3)
    assert all(map(torch.equal, one, three))
    assert not any(map(torch.equal, one, dummy_downs(MODEL, 1, seed=1)))
    assert not torch.equal(one[0], one[1])


def test_dummy_weights_are_the_same_in_every_dtype() -> None:
    source = DummyCheckpoint(MODEL)
    exact = load_shared(source, MODEL, dtype=torch.float64)
    rounded = load_shared(source, MODEL, dtype=torch.bfloat16)
    assert torch.equal(exact.embed_VD.to(torch.bfloat16), rounded.embed_VD)
    assert torch.equal(exact.norm_D, torch.ones(160, dtype=torch.float64))
    assert 0.9 < exact.head_VD.std() * 160**0.5 < 1.1


def test_dummy_experts_of_an_fp8_model_are_fp8_or_their_dequantised_values() -> None:
    model = parse_model_config(SMALL | {"quantization_config": FP8})
    kept, plain_downs = dummy_downs(model, 2, keep_fp8=True), dummy_downs(model, 2)
    assert all(map(torch.equal, kept, plain_downs))
    bank = load_banks(DummyCheckpoint(model), model, spread(6, 2), rank=0, dtype=torch.bfloat16, keep_fp8=True)[1]
    assert bank is not None
    assert bank.scales is not None
