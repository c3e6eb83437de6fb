"""What the flags of `vllm serve` mean here, one by one: a setting, nothing to say, or no counterpart and why.

Data and small functions; `plan_vllm` reads a command line and puts it together. Names and meanings as of vLLM 0.2x.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Settings = dict[str, str | int | float | bool]
"""Names of settings here, and their values."""
Means = Callable[[str], Settings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One flag of vLLM.

    means    the settings that a value stands for; None where there are none
    kind     same: a setting; always: it is so here anyway; elsewhere: said to another part; none: no counterpart
    says     why, for people
    values   words that follow: 0 for a switch, 1, or -1 for all up to the next flag
    door     the setting of `serried serve` that its value is, if it is one
    """

    kind: Literal["same", "always", "elsewhere", "none"]
    says: str = ""
    means: Means | None = None
    values: int = 1
    door: str = ""


def whole(text: str) -> int:
    """A whole number as vLLM reads it: 32k are 32,000, 32K are 32,768. ValueError for anything else."""
    scales = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    scale = scales.get(text[-1:], 1)
    number = float(text[:-1] if text[-1:] in scales else text) * scale
    if number != int(number):
        raise ValueError(f"{text!r} is no whole number")
    return int(number)


def _number(name: str) -> Rule:
    return Rule(kind="same", means=lambda text: {name: whole(text)})


def _word(name: str, words: Mapping[str, str] | None = None, *, says: str = "") -> Rule:
    """`words`: those that are spelled otherwise here; any other stays."""
    return Rule(kind="same", says=says, means=lambda text: {name: (words or {}).get(text, text)})


def _switch(says: str = "", **settings: str | int | bool) -> Rule:
    return Rule(kind="same", says=says, means=lambda _: dict(settings), values=0)


def _always(says: str, *, values: int = 0) -> Rule:
    return Rule(kind="always", says=says, values=values)


def _none(says: str, *, values: int = 1) -> Rule:
    return Rule(kind="none", says=says, values=values)


def _elsewhere(says: str, *, values: int = 1) -> Rule:
    return Rule(kind="elsewhere", says=says, values=values)


def _dtype(text: str) -> Settings:
    names = {"half": "float16", "float": "float32"}
    return {"dtype": names.get(text, text)}


def _eplb(text: str) -> Settings:
    """--eplb-config as JSON."""
    names = {"num_redundant_experts": "num_redundant_experts", "window_size": "eplb_window"}
    names["step_interval"] = "eplb_interval"
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return {names[name]: value for name, value in said.items() if name in names}


def _backend(text: str) -> Settings:
    modes = {"deepep_low_latency": "bounded", "pplx": "bounded", "deepep_high_throughput": "exact", "naive": "exact"}
    return {"exchange": modes.get(text, "auto")}


def _longest(text: str) -> Settings:
    return {} if text in ("auto", "-1") else {"max_model_len": whole(text)}


def _share(text: str) -> Settings:
    return {"gpu_memory_utilization": float(text)}


def _load_format(text: str) -> Settings:
    return {"load_format": "dummy" if text == "dummy" else "auto"}


DOOR = "the gateway's, before serried serve"
MEETING = "ranks meet by --rendezvous, --key-file and --interface, or by the launcher's own words"
TENSOR = (
    "MLA keeps one latent for all heads, so splitting heads would only copy it: --ranks is --data-parallel-size x this"
)
LAUNCHER = "torchrun, mpirun or srun start the ranks"

RULES: dict[str, Rule] = {
    # Sizes that become ranks and nodes are put together by `plan_vllm`.
    "data-parallel-size": Rule(kind="same", says="each GPU is a rank: --ranks counts them"),
    "tensor-parallel-size": Rule(kind="same", says=TENSOR),
    "data-parallel-size-local": Rule(kind="same", says="ranks of a node: --node-size"),
    "pipeline-parallel-size": _none("layers are not spread over ranks; more ranks hold fewer experts each"),
    "decode-context-parallel-size": _none("a request's latents stay on one rank"),
    "enable-expert-parallel": _always("experts are always spread over all ranks"),
    "data-parallel-address": _elsewhere(MEETING),
    "data-parallel-rpc-port": _elsewhere(MEETING),
    "data-parallel-start-rank": _elsewhere(LAUNCHER),
    "data-parallel-rank": _elsewhere(LAUNCHER),
    "data-parallel-backend": _elsewhere(LAUNCHER),
    "data-parallel-hybrid-lb": _elsewhere(DOOR, values=0),
    "data-parallel-external-lb": _elsewhere(DOOR, values=0),
    "distributed-executor-backend": _elsewhere(LAUNCHER),
    "nnodes": _elsewhere(LAUNCHER),
    "node-rank": _elsewhere(LAUNCHER),
    "master-addr": _elsewhere(MEETING),
    "master-port": _elsewhere(MEETING),
    "headless": _always("only rank 0 has a front end"),
    # Step loop.
    "max-num-seqs": _number("max_num_seqs"),
    "max-num-batched-tokens": _number("max_num_batched_tokens"),
    "long-prefill-token-threshold": _number("long_prefill_token_threshold"),
    "max-model-len": Rule(kind="same", means=_longest),
    "prefill-schedule-interval": _number("prefill_schedule_interval"),
    "scheduling-policy": _word("scheduling_policy"),
    "enable-chunked-prefill": _always("prompts are always cut to fit the step"),
    "no-enable-chunked-prefill": _none("prompts are always cut to fit the step", values=0),
    "async-scheduling": _switch("one step ahead", async_depth=1),
    "no-async-scheduling": _switch("", async_depth=0),
    "enforce-eager": _switch("", enforce_eager=True),
    "compilation-config": _none("there is no compiler in between; kernels are Triton's"),
    "cudagraph-capture-sizes": _none("--cuda-graph-sizes says it here, in tokens of a step", values=-1),
    "speculative-config": _none("drafts come from Python (Engine(drafter=...)); heads for several tokens are not run"),
    "max-num-partial-prefills": _none("each step takes as many prompts as it has tokens for"),
    # Cache.
    "block-size": _number("block_size"),
    "gpu-memory-utilization": Rule(kind="same", means=_share),
    "num-gpu-blocks-override": _number("num_blocks"),
    "kv-cache-memory-bytes": _number("kv_cache_memory_bytes"),
    "kv-cache-dtype": _word("kv_cache_dtype", {"fp8_e4m3": "fp8", "bf16": "bfloat16", "fp8_ds_mla": "fp8"}),
    "enable-prefix-caching": _switch("", enable_prefix_caching=True),
    "no-enable-prefix-caching": _switch("", enable_prefix_caching=False),
    "swap-space": _none("a preempted request is computed again"),
    "cpu-offload-gb": _none("weights stay on the device"),
    "kv-transfer-config": _none("latents are not handed over: a group computes its prompts itself"),
    "kv-events-config": _elsewhere(DOOR),
    # Experts and overlap.
    "enable-eplb": _switch("", enable_eplb=True),
    "eplb-config": Rule(
        kind="same", says="window, interval and copies; moves are always in the background", means=_eplb
    ),
    "num-redundant-experts": _number("num_redundant_experts"),
    "expert-placement-strategy": _none("experts sit in order at the start, or as --init-placement says"),
    "enable-dbo": _switch("", dbo="on"),
    "dbo-decode-token-threshold": _number("dbo_decode_token_threshold"),
    "dbo-prefill-token-threshold": _number("dbo_prefill_token_threshold"),
    "ubatch-size": _number("dbo_tracks"),
    "all2all-backend": Rule(kind="same", says="by what it does: fixed blocks, or counts first", means=_backend),
    "disable-nccl-for-dp-synchronization": _always("votes travel over a star of sockets"),
    "enable-elastic-ep": _none("a group keeps its ranks until it ends", values=0),
    "enable-fault-tolerance": _none("a group whose rank fails ends, and says which", values=0),
    "moe-backend": _none("--ops says whose kernels, for all rooms"),
    "attention-backend": _none("--ops says whose kernels, for all rooms"),
    "attention-config": _none("--ops says whose kernels, for all rooms"),
    # Model.
    "dtype": Rule(kind="same", means=_dtype),
    "seed": _number("seed"),
    "load-format": Rule(kind="same", says="safetensors or dummy", means=_load_format),
    "quantization": _always("the checkpoint says how it is stored", values=1),
    "trust-remote-code": _none("no code of a checkpoint is ever run", values=0),
    "revision": _none("MODEL is a folder that is there already"),
    "download-dir": _none("MODEL is a folder that is there already"),
    "hf-overrides": _none("the checkpoint's own config.json counts"),
    "config-format": _none("the checkpoint's own config.json counts"),
    "tokenizer": _elsewhere(DOOR),
    "tokenizer-mode": _elsewhere(DOOR),
    "skip-tokenizer-init": _elsewhere(DOOR, values=0),
    "enable-lora": _none("there are no adapters", values=0),
    "lora-modules": _none("there are no adapters", values=-1),
    "limit-mm-per-prompt": _none("there are no images"),
    # Front door.
    "host": Rule(kind="same", door="host", says="beyond loopback with --tls-cert and --token-file"),
    "port": Rule(kind="same", door="openai_port"),
    "uvicorn-log-level": _elsewhere(DOOR),
    "api-key": _elsewhere("--token-file guards gRPC; keys of OpenAI's API are the gateway's", values=-1),
    "api-server-count": _elsewhere(DOOR),
    "served-model-name": Rule(kind="same", door="served_model_name", says="the first of them", values=-1),
    "chat-template": _elsewhere(DOOR),
    "tool-call-parser": _elsewhere(DOOR),
    "enable-auto-tool-choice": _elsewhere(DOOR, values=0),
    "reasoning-parser": _elsewhere(DOOR),
    "generation-config": _elsewhere(DOOR),
    "disable-log-requests": _elsewhere(DOOR, values=0),
    "enable-log-requests": _elsewhere(DOOR, values=0),
    "disable-log-stats": _elsewhere(DOOR, values=0),
    "otlp-traces-endpoint": _elsewhere(DOOR),
}

ALIASES = {
    "tp": "tensor-parallel-size", "dp": "data-parallel-size", "pp": "pipeline-parallel-size", "q": "quantization",
    "dpl": "data-parallel-size-local", "dpn": "data-parallel-rank", "dpr": "data-parallel-start-rank",
    "dpa": "data-parallel-address", "dpp": "data-parallel-rpc-port", "dpb": "data-parallel-backend",
    "dcp": "decode-context-parallel-size", "ep": "enable-expert-parallel", "O": "compilation-config",
    "cc": "compilation-config", "n": "nnodes", "r": "node-rank", "ac": "attention-config",
}  # fmt: skip

MODELS = {
    "deepseek-v2-lite": "deepseek-v2-lite", "deepseek-v2": "deepseek-v2", "deepseek-coder-v2": "deepseek-v2",
    "deepseek-v3": "deepseek-v3", "deepseek-r1": "deepseek-v3", "kimi-k2": "kimi-k2", "moonlight": "moonlight-16b-a3b",
    "glm-4.7-flash": "glm-4.7-flash",
}  # fmt: skip
"""How a hub's name begins -> the configuration here; the longest beginning counts."""
NOT_SAME_MODEL = ("deepseek-v3.2", "deepseek-r1-distill", "deepseek-coder-v2-lite")
"""Names that begin like one of them and are built otherwise."""


def of_vllm(word: str) -> str | None:
    """What to say to someone who gives `word`, a flag of `vllm serve`, here; None where vLLM has no such flag."""
    name = word.lstrip("-").replace("_", "-")
    rule = RULES.get(ALIASES.get(name, name) if len(name) > 1 else name)
    if rule is None:
        return None
    means = {"none": "has no counterpart here", "always": "need not be said here", "elsewhere": "is not said here"}
    head = f"{word} is a flag of vLLM that {means.get(rule.kind, 'is said otherwise here')}"
    why = f": {rule.says}" if rule.says else ""
    if rule.door:
        why = f": --{rule.door.replace('_', '-')} of serried serve"
    return f"{head}{why}; serried plan --from-vllm 'vllm serve ...' translates a whole command line"
