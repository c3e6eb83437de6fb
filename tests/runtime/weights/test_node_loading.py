"""Loading where ranks are processes: what they hold alike is read once a node, and every rank has its own weights."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_mla import MlaWeights, mla_shapes
from ep import CheckpointError, PeerFailed
from moe import spread
from runtime.model.model_config import ModelConfig, parse_model_config, read_model_config
from runtime.weights.checkpoint import Progress, Wanted, open_checkpoint
from runtime.weights.dummy import DummyCheckpoint
from runtime.weights.node_loading import LoadedRank, load_rank, part_of
from runtime.weights.node_share import NodePeers
from runtime.weights.weight_layout import Arena, Places, lay_out_shared
from runtime.weights.weights import DecoderWeights, load_banks, load_shared
from tests.runtime.checkpoints import SMALL, names_and_shapes, random_tensors, write_checkpoint
from tests.runtime.peers import digest, keep_hub, run_threads, tensors_of

ROOT = Path(__file__).parents[3]
MODEL = parse_model_config(SMALL)
TINY = ROOT / "profiles" / "models" / "tiny-v3"


# ---- who reads what


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 200])
def test_the_parts_are_all_and_each_name_is_in_one(size: int) -> None:
    model = parse_model_config(SMALL | {"tie_word_embeddings": True})
    places = Places(Arena.measuring().empty)
    lay_out_shared(places, model, dtype=torch.bfloat16)
    parts = [part_of(places.wanted, place=place, size=size) for place in range(size)]
    assert sorted(id(each) for part in parts for each in part) == sorted(map(id, places.wanted))
    names = [{each.name for each in part} for part in parts]
    assert sum(map(len, names)) == len(set().union(*names))
    if size <= 4:
        total = sum(each.out.nbytes for each in places.wanted)
        largest = max(each.out.nbytes for each in places.wanted)
        assert all(sum(each.out.nbytes for each in part) <= total / size + largest for part in parts)


def test_a_layout_in_one_piece_is_aligned_and_without_overlap() -> None:
    arena = Arena.measuring()
    lay_out_shared(Places(arena.empty), MODEL, dtype=torch.bfloat16)
    flat_B = torch.zeros(arena.num_bytes, dtype=torch.uint8)
    places = Places(Arena(flat_B).empty)
    shared = lay_out_shared(places, MODEL, dtype=torch.bfloat16)
    for each in places.wanted:
        assert not each.out.any(), each.name
        each.out.fill_(1)
    assert all(tensor.all() for tensor in tensors_of(shared))
    fused = ("up_proj.weight", "kv_a_proj_with_mqa.weight")  # these begin within a tensor
    assert all(each.out.data_ptr() % 64 == 0 for each in places.wanted if not each.name.endswith(fused))


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_attention_is_laid_out_as_it_would_be_built(q_lora_rank: int | None) -> None:
    model = parse_model_config(SMALL | {"q_lora_rank": q_lora_rank})
    source = DummyCheckpoint(model)
    drawn = {name: torch.empty(shape) for name, shape in mla_shapes(model.mla).items()}
    source.read([Wanted(name=f"model.layers.2.self_attn.{name}", out=out) for name, out in drawn.items()])
    built = MlaWeights.build(model.mla, drawn)
    found = load_shared(source, model, dtype=torch.float32).layers[2].attention
    for item in fields(MlaWeights):
        one, other = getattr(found, item.name), getattr(built, item.name)
        assert (one is None and other is None) or (torch.equal(one, other) and one.stride() == other.stride()), item


# ---- loading


def load_all(
    source_of: Callable[[int], Any], model: ModelConfig, size: int, **how: Any
) -> list[LoadedRank | Exception]:
    """Every rank of one node, as threads."""
    placement = spread(6, size)
    return run_threads(size, lambda peers: load_rank(source_of(peers.rank), model, placement, peers=peers, **how))


def alone(source: Any, model: ModelConfig, rank: int, size: int, **how: Any) -> DecoderWeights:
    """The same rank's weights without a node."""
    banks = load_banks(source, model, spread(6, size), rank=rank, **how)
    how.pop("keep_fp8", None)
    return DecoderWeights.join(load_shared(source, model, **how), banks)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_has_the_weights_that_it_would_load_alone(
    tmp_path: Path, size: int, dtype: torch.dtype, fp8: bool, tied: bool
) -> None:
    model = parse_model_config(SMALL | {"tie_word_embeddings": tied})
    tensors = random_tensors(SMALL, fp8=fp8)
    folder = write_checkpoint(tmp_path, SMALL, tensors, shards=3)
    how = {"dtype": dtype, "keep_fp8": fp8}
    sources = [open_checkpoint(folder, model, turn=(rank, size)) for rank in range(size)]
    for rank, loaded in enumerate(load_all(sources.__getitem__, model, size, **how)):
        assert isinstance(loaded, LoadedRank), loaded
        expected = alone(open_checkpoint(folder, model), model, rank, size, **how)
        assert digest(loaded.weights) == digest(expected)
        assert loaded.report.bytes_read == sources[rank].bytes_read
        assert loaded.report.node_bytes == sum(source.bytes_read for source in sources)
        assert loaded.report.num_ranks == size
    unique = sum(tensor.nbytes for name, tensor in tensors.items() if not (tied and name == "lm_head.weight"))
    assert sum(source.bytes_read for source in sources) == unique


def test_a_model_without_query_latent_or_experts_is_loaded_too() -> None:
    model = parse_model_config(SMALL | {"q_lora_rank": None, "n_routed_experts": None, "first_k_dense_replace": 3})

    def load(peers: NodePeers) -> LoadedRank:
        return load_rank(DummyCheckpoint(model), model, None, peers=peers, dtype=torch.float32)

    expected = DecoderWeights.join(load_shared(DummyCheckpoint(model), model, dtype=torch.float32), [None] * 3)
    for loaded in run_threads(2, load):
        assert isinstance(loaded, LoadedRank), loaded
        assert digest(loaded.weights) == digest(expected)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    source = open_checkpoint(TINY, read_model_config(TINY))
    load_rank(
        source, read_model_config(TINY), spread(32, 1), peers=NodePeers.alone(), dtype=torch.bfloat16,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (source.bytes_read, source.bytes_read)
    assert {total for _, total in seen} == {source.bytes_read}


def test_a_rank_whose_expert_is_missing_stops_all_before_anything_is_read(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL)
    tensors.pop("model.layers.1.mlp.experts.4.up_proj.weight")
    folder = write_checkpoint(tmp_path, SMALL, tensors)
    sources = [open_checkpoint(folder, MODEL) for _ in range(3)]
    first, second, third = load_all(sources.__getitem__, MODEL, 3, dtype=torch.bfloat16)
    assert isinstance(third, CheckpointError)
    assert "experts.4.up_proj" in str(third)
    for error in (first, second):
        assert isinstance(error, PeerFailed)
        assert (error.culprit, error.cause) == (2, "failed while checking its weights; it says why")
    assert [source.bytes_read for source in sources] == [0, 0, 0]


class FailingSource(DummyCheckpoint):
    """Its disk breaks."""

    def read(self, wanted: Sequence[Wanted], *, progress: Progress | None = None) -> None:
        raise OSError("input/output error")


def test_a_rank_whose_disk_fails_stops_all() -> None:
    def source_of(rank: int) -> DummyCheckpoint:
        return FailingSource(MODEL) if rank == 1 else DummyCheckpoint(MODEL)

    first, second = load_all(source_of, MODEL, 2, dtype=torch.bfloat16)
    assert isinstance(second, OSError)
    assert isinstance(first, PeerFailed)
    assert (first.culprit, first.cause) == (1, "failed while reading its weights; it says why")


def test_ranks_that_would_lay_out_weights_differently_are_told_apart() -> None:
    def load(peers: NodePeers) -> LoadedRank:
        dtype = torch.float32 if peers.rank == 1 else torch.bfloat16
        return load_rank(DummyCheckpoint(MODEL), MODEL, spread(6, 2), peers=peers, dtype=dtype)

    for error in run_threads(2, load):
        assert isinstance(error, PeerFailed)
        assert error.culprit == 1
        assert "lays out shared weights otherwise" in str(error)


# ---- processes


RANDOM = SMALL | {
    "vocab_size": 6144,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 5,
    "n_routed_experts": 8,
}


def write_random_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Random bits in bfloat16, as good as any for who only moves them; in one file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in names_and_shapes(config).items():
        start, end = end, end + math.prod(shape) * 2
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header + np.random.default_rng(5).bytes(end))


def run_processes(size: int, folders: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """What each rank of a node of processes says of each folder."""
    pairs = [socket.socketpair() for _ in range(size)]
    command = [sys.executable, "-m", "tests.runtime.load_node"]
    ranks = []
    for rank, (_, theirs) in enumerate(pairs):
        arguments = [str(rank), str(size), str(theirs.fileno()), *map(str, folders)]
        ranks.append(
            subprocess.Popen(
                [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]
            )
        )
        theirs.close()
    hub = threading.Thread(target=keep_hub, args=([ours for ours, _ in pairs],))
    hub.start()
    answers = [rank.communicate(timeout=100)[0] for rank in ranks]
    hub.join()
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(answer) for answer in answers]


@pytest.mark.slow
def test_four_processes_read_and_hold_once_what_they_hold_alike(tmp_path: Path) -> None:
    large = tmp_path / "large"
    write_random_checkpoint(large, RANDOM)
    folders = [TINY, large]
    answers = run_processes(4, folders)
    for place, folder in enumerate(folders):
        model = read_model_config(folder)
        assert model.moe is not None
        ranks = [answer[place] for answer in answers]
        file = folder / "model.safetensors"
        unique = file.stat().st_size
        assert sum(rank["read"] for rank in ranks) <= 1.05 * unique, ranks
        assert ranks[0]["node"] == sum(rank["own"] for rank in ranks) <= unique
        assert len({rank["memory"] for rank in ranks}) == 1
        assert ranks[0]["memory"].startswith("r--s ")
        shared = load_shared(open_checkpoint(folder, model), model, dtype=model.dtype)
        for index, rank in enumerate(ranks):
            placement = spread(model.moe.num_experts, 4)
            banks = load_banks(open_checkpoint(folder, model), model, placement, rank=index, dtype=model.dtype)
            assert rank["digest"] == digest(DecoderWeights.join(shared, banks))
