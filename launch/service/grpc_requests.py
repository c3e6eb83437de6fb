"""From a GenerateRequest to what the group is asked: every field read, checked, or refused by its name.

In proto3 a number that was not sent is 0, so 0 stands for the neutral value where the format has no other way. Knows
messages, limits and the model's sizes; does not know who runs the request.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from ep.errors import RequestError
from runtime.requests.sampling_params import MAX_INT32, SamplingParams

from ..front.front_client import GroupInfo
from .grpc_faults import fault_of, invalid, not_served
from .serve_config import LimitsConfig

MAX_ID_LEN = 256
MAX_TRANSFER_BYTES = 65_536

CONSTRAINTS = {
    "json_schema": "an output that follows a JSON schema",
    "regex": "an output that matches a pattern",
    "grammar": "an output that follows a grammar",
    "structural_tag": "an output with structural tags",
    "json_object": "an output that is JSON",
    "choice": "a choice of outputs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, checked. `stop` holds the stop strings, which the group does not know."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    n: int
    stream: bool
    stop: tuple[str, ...]
    skip_special_tokens: bool
    rank: int | None
    kv_transfer_params: dict[str, Any] | None


Encode = Callable[[str], list[int]]
"""Text to token ids."""


def read_generate(request: pb.GenerateRequest, info: GroupInfo, limits: LimitsConfig, encode: Encode | None) -> Asked:
    """`encode` is None where the model has no tokenizer. Raises Fault."""
    asked = request.sampling_params
    _refuse_what_is_not_served(request)
    prompt = _cut(_prompt(request, encode), asked, info)
    _check_prompt(prompt, info, limits)
    return Asked(
        request_id=_request_id(request.request_id),
        prompt=prompt,
        params=_params(asked, limits, room=info.max_model_len - len(prompt)),
        n=_n(asked, limits),
        stream=request.stream,
        stop=_stop_strings(asked.stop, limits, encode),
        skip_special_tokens=asked.skip_special_tokens,
        rank=_rank(request.data_parallel_rank, info) if request.HasField("data_parallel_rank") else None,
        kv_transfer_params=_transfer(request),
    )


def _refuse_what_is_not_served(request: pb.GenerateRequest) -> None:
    if request.HasField("mm_inputs") or request.extra_mm_inputs or request.HasField("media_refs"):
        raise not_served("mm_inputs", "input of images, sound or video")
    constraint = request.sampling_params.WhichOneof("constraint")
    if constraint is not None and getattr(request.sampling_params, constraint):
        raise not_served(constraint, CONSTRAINTS[constraint])


def _request_id(given: str) -> str:
    """The client's own, or one that is made up: a request that nobody named cannot be aborted by name."""
    if len(given) > MAX_ID_LEN:
        raise invalid("request_id", f"{given[:40]}...", f"must have at most {MAX_ID_LEN} characters")
    return given or uuid.uuid4().hex


def _prompt(request: pb.GenerateRequest, encode: Encode | None) -> Sequence[int]:
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        return list(request.tokenized.input_ids)
    if kind is None:
        raise invalid("input", None, "must be tokenized.input_ids or text, e.g. input_ids [1, 2, 3]")
    if encode is None:
        raise invalid("text", _short(request.text), "the model has no tokenizer.json; send tokenized.input_ids")
    return encode(request.text)


def _cut(prompt: Sequence[int], asked: pb.SamplingParams, info: GroupInfo) -> Sequence[int]:
    """The last `truncate_prompt_tokens` of a prompt; -1 stands for as many as the model takes."""
    if not asked.HasField("truncate_prompt_tokens"):
        return prompt
    kept = asked.truncate_prompt_tokens
    if kept == 0 or kept < -1:
        raise invalid("truncate_prompt_tokens", kept, "must be at least 1, or -1 for as many as the model takes")
    return prompt[-(info.max_model_len - 1 if kept == -1 else kept) :]


def _check_prompt(prompt: Sequence[int], info: GroupInfo, limits: LimitsConfig) -> None:
    if not prompt:
        raise invalid("prompt", "0 tokens", "must have at least 1 token")
    longest = min(info.max_model_len - 1, limits.max_prompt_tokens or info.max_model_len)
    if len(prompt) > longest:
        raise invalid("prompt", f"{len(prompt)} tokens", f"must have at most {longest} tokens")
    if (highest := max(prompt)) >= info.vocab_size:
        place = prompt.index(highest)
        raise invalid(f"input_ids[{place}]", highest, f"must be at most {info.vocab_size - 1}, the vocabulary's last")


def _params(asked: pb.SamplingParams, limits: LimitsConfig, *, room: int) -> SamplingParams:
    """What the sampler is asked. `room` is how many tokens the model's length leaves."""
    chosen: dict[str, Any] = {
        "temperature": _plain(asked.temperature) if asked.HasField("temperature") else 1.0,
        "top_p": _plain(asked.top_p) or 1.0,
        "top_k": min(asked.top_k, MAX_INT32),
        "min_p": _plain(asked.min_p),
        "frequency_penalty": _plain(asked.frequency_penalty),
        "presence_penalty": _plain(asked.presence_penalty),
        "repetition_penalty": _plain(asked.repetition_penalty) or 1.0,
        "max_tokens": _max_tokens(asked, limits, room),
        "min_tokens": asked.min_tokens,
        "stop_token_ids": tuple(asked.stop_token_ids),
        "ignore_eos": asked.ignore_eos,
        "logit_bias": {token: _plain(bias) for token, bias in asked.logit_bias.items()} or None,
    }
    for name in ("logprobs", "prompt_logprobs", "seed"):
        if asked.HasField(name):
            chosen[name] = getattr(asked, name)
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise fault_of(error) from error


def _plain(number: float) -> float:
    """What the client wrote: on the wire 0.7 is a 32-bit float, 0.699999988, and another temperature."""
    return float(f"{number:.7g}")


def _max_tokens(asked: pb.SamplingParams, limits: LimitsConfig, room: int) -> int:
    most = limits.max_output_tokens or room
    if not asked.HasField("max_tokens"):
        return min(most, room)
    if limits.max_output_tokens is not None and asked.max_tokens > most:
        raise invalid("max_tokens", asked.max_tokens, f"must be at most {most} on this server")
    if asked.max_tokens < 1:
        raise invalid("max_tokens", asked.max_tokens, "must be at least 1, or be left out")
    return min(asked.max_tokens, room)


def _n(asked: pb.SamplingParams, limits: LimitsConfig) -> int:
    if asked.n > limits.max_n:
        raise invalid("n", asked.n, f"must be at most {limits.max_n} on this server")
    return asked.n or 1


def _stop_strings(stop: Sequence[str], limits: LimitsConfig, encode: Encode | None) -> tuple[str, ...]:
    if len(stop) > limits.max_stop:
        raise invalid("stop", f"{len(stop)} strings", f"must have at most {limits.max_stop} strings")
    for index, text in enumerate(stop):
        if not text:
            raise invalid(f"stop[{index}]", "", "must have at least 1 character")
        if len(text) > limits.max_stop_len:
            rule = f"must have at most {limits.max_stop_len} characters"
            raise invalid(f"stop[{index}]", f"{len(text)} characters", rule)
    if stop and encode is None:
        raise invalid("stop", _short(stop[0]), "the model has no tokenizer.json; use stop_token_ids")
    return tuple(dict.fromkeys(stop))


def _rank(rank: int, info: GroupInfo) -> int:
    if not 0 <= rank < info.ranks:
        raise invalid("data_parallel_rank", rank, f"must be from 0 to {info.ranks - 1}, or be left out")
    return rank


def _transfer(request: pb.GenerateRequest) -> dict[str, Any] | None:
    """The connector's parameters, as JSON; the typed message of old gateways is taken as the same."""
    if request.HasField("kv_transfer_params_json"):
        return _json_object("kv_transfer_params_json", request.kv_transfer_params_json)
    if request.HasField("kv_transfer_params"):
        old = request.kv_transfer_params
        return {"remote_host": old.remote_host, "remote_port": old.remote_port}
    return None


def _json_object(field: str, text: str) -> dict[str, Any]:
    if len(text) > MAX_TRANSFER_BYTES:
        raise invalid(field, f"{len(text)} characters", f"must have at most {MAX_TRANSFER_BYTES}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, _short(text), f"must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid(field, _short(text), "must be an object")
    return value


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
