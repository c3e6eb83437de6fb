"""What the group is and how it is, as the messages that gateways ask for.

Knows messages, the model's folder and what the group says of itself; does not know calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from ..front.front_client import GroupInfo, RankLoad

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of generation_config.json: what a model's makers want for requests that say nothing."""


def model_info(info: GroupInfo) -> pb.GetModelInfoResponse:
    """What the model is."""
    folder = Path(info.model_path)
    return pb.GetModelInfoResponse(
        model_path=info.model_path,
        is_generation=True,
        max_context_length=info.max_model_len,
        vocab_size=info.vocab_size,
        served_model_name=info.served_model_name,
        tokenizer_path=str(folder.resolve()),
        model_type=info.model_type,
        architectures=_json_object(folder / "config.json").get("architectures") or (),
        eos_token_ids=info.eos_token_ids,
        bos_token_id=info.bos_token_id or 0,
        max_req_input_len=info.max_model_len - 1,
        default_sampling_params_json=json.dumps(default_sampling(folder)),
    )


def default_sampling(folder: Path) -> dict[str, float]:
    """What the model's folder says of sampling, where those are numbers; nothing when it asks for the likeliest token.

    Temperature and the like count only with `do_sample`, as where the file comes from.
    """
    said = _json_object(folder / "generation_config.json")
    if said.get("do_sample") is False:
        return {}
    wanted = {name: said.get(name) for name in SAMPLING_DEFAULTS}
    return {name: value for name, value in wanted.items() if isinstance(value, int | float) and value is not True}


def server_info(
    info: GroupInfo, *, active: int, draining: bool, last_request: float, uptime_s: float
) -> pb.GetServerInfoResponse:
    """How the group is set up. `last_request` in seconds since 1970."""
    return pb.GetServerInfoResponse(
        active_requests=active,
        is_paused=draining,
        last_receive_timestamp=last_request,
        uptime_seconds=uptime_s,
        server_type="vllm-grpc",
        kv_connector=info.kv_connector,
        kv_engine_id=info.kv_engine_id,
        data_parallel_size=info.ranks,
        kv_cache_dtype=info.kv_cache_dtype,
        block_size=info.block_size,
        model_dtype=info.model_dtype,
        max_num_seqs=info.max_num_seqs * info.ranks,
    )


def loads(info: GroupInfo, wanted: Sequence[RankLoad]) -> pb.GetLoadsResponse:
    """Queues and caches of these ranks."""
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=info.version,
        dp_rank_count=info.ranks,
        loads=[_load(load, info) for load in wanted],
    )


def _load(load: RankLoad, info: GroupInfo) -> pb.SchedulerLoad:
    return pb.SchedulerLoad(
        dp_rank=load.rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=load.used_pages * info.block_size,
        max_total_num_tokens=load.num_pages * info.block_size,
        token_usage=load.used_pages / max(load.num_pages, 1),
        gen_throughput=load.gen_tokens_per_s,
        cache_hit_rate=load.prefix_hit_rate,
        utilization=min(1.0, load.running / max(info.max_num_seqs, 1)),
        max_running_requests=info.max_num_seqs,
        num_waiting_uncached_tokens=load.waiting_tokens,
    )


def _json_object(path: Path) -> dict[str, Any]:
    """A file of the model's folder, which the ranks have read before; empty where there is none, or no object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
