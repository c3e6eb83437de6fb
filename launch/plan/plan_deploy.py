"""A recommended deployment as a file for --profile, and as the command lines that start it.

    [deployment]   for people: what it was planned for, and what is expected of it
    [settings]     for --profile: fields of the engine's configuration that differ from their defaults

Knows what is written; `config_profile` reads it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.planning.deployments import Point
from runtime.planning.goals import Goals
from runtime.settings.config import EngineConfig

from ..command.config_profile import NOT_SETTINGS, setting_words

if TYPE_CHECKING:
    from .plan_goals import Wish

FOLDER = "MODEL_FOLDER"
"""What stands for a checkpoint where only the name of a configuration is known."""


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """Fields, nested ones too, that are not their defaults. Names are those of the flags."""
    return {name: value for name, value, default in _flat(config, EngineConfig(model="")) if value != default}


def deployment_text(wish: Wish, point: Point, *, command: str = "") -> str:
    """The file."""
    goals = wish.goals
    about: dict[str, Any] = {
        "model": wish.model,
        "gpu": wish.gpu,
        "gpus": goals.gpus,
        "node_size": goals.node_size,
        "context": goals.context,
        "output_len": goals.output_len,
        "prefill": goals.prefill,
        "tpot_ms": round(point.tpot_ms, 1),
        "ttft_ms": round(point.ttft_ms),
        "tokens_per_s_per_gpu": round(point.tokens_per_gpu),
    }
    settings = settings_of(point.config) | {"hardware": wish.gpu}
    lines = [
        f"# Written by: {command}" if command else "# Written by serried plan.",
        "# Expected by the cost model, never run on such a machine; see README.",
        "[deployment]",
        *[f"{name} = {_toml(value)}" for name, value in about.items()],
        "",
        "# What --profile reads; flags win over it.",
        "[settings]",
        *[f"{name} = {_toml(value)}" for name, value in settings.items()],
    ]
    return "\n".join(lines) + "\n"


def plan_command(wish: Wish) -> str:
    """The command that leads to it, without what is written."""
    goals = wish.goals
    words = [
        "serried",
        "plan",
        wish.model,
        "--gpus",
        str(goals.gpus),
        "--gpu",
        wish.gpu,
        "--context",
        str(goals.context),
    ]
    words += ["--output-len", str(goals.output_len), "--node-size", str(goals.node_size), "--prefill", goals.prefill]
    for name, value in (("tpot-ms", goals.tpot_ms), ("ttft-ms", goals.ttft_ms), ("request-rate", goals.request_rate)):
        if value is not None:
            words += [f"--{name}", f"{value:g}"]
    for name, number in (("ranks", wish.ranks), ("batch", wish.batch)):
        if number is not None:
            words += [f"--{name}", str(number)]
    return shlex.join(words)


def write_deployment(path: Path, wish: Wish, point: Point) -> None:
    """Whole or not at all. Raises ValueError for a file that is no deployment and would be lost, OSError else."""
    if path.exists() and "[settings]" not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"save is {str(path)!r}, which exists and is no deployment, so it is left as it is")
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(deployment_text(wish, point, command=plan_command(wish)), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def command_lines(model: str, config: EngineConfig, goals: Goals, *, profile: Path | None) -> list[str]:
    """How to start a group, under every launcher. Without a file of it, the settings are spelled out."""
    folder = shlex.quote(model) if Path(model).is_dir() else FOLDER
    words = [folder, "--prompts", "requests.jsonl", *_setting_words(config, profile)]
    ranks = config.ranks
    nodes, local = -(-ranks // goals.node_size), min(ranks, goals.node_size)
    groups = goals.gpus // ranks
    meet = ["--rendezvous", '"$HEAD:29600"', "--key-file", "KEY", "--interface", "IFACE"] if nodes > 1 else []
    meet_torchrun = ["--rendezvous", ":29600", *meet[2:]] if meet else []
    run = ["python", "-m", "launch", "generate", *words]
    torchrun = ["torchrun"]
    if nodes > 1:
        torchrun += ["--nnodes", str(nodes), "--node-rank", '"$NODE"', "--master-addr", '"$HEAD"']
    else:
        torchrun += ["--standalone"]
    torchrun += ["--nproc-per-node", str(local), "-m", "launch", "generate", *words, *meet_torchrun]
    mpirun = ["mpirun", "-n", str(ranks), *(["--map-by", f"ppr:{local}:node"] if nodes > 1 else []), *run, *meet]
    srun = ["srun", "-n", str(ranks), *(["-N", str(nodes), "--ntasks-per-node", str(local)] if nodes > 1 else [])]
    lines = [f"To start {'it' if groups == 1 else f'each of the {groups} groups'}:"]
    lines.append("  `serve` in place of `generate` and --prompts serves it; one of:")
    if folder == FOLDER:
        lines.append(f"  {FOLDER} is the checkpoint's folder, on every node")
    if nodes > 1:
        lines.append(
            "  HEAD is the first node's address, NODE a node's number, KEY a file of 0600, IFACE the network's name"
        )
    return [*lines, *[f"  {' '.join(each)}" for each in (torchrun, mpirun, [*srun, *run, *meet])]]


def _setting_words(config: EngineConfig, profile: Path | None) -> list[str]:
    if profile is not None:
        return ["--profile", shlex.quote(str(profile))]
    settings = {name: value for name, value in settings_of(config).items() if name != "hardware"}
    return [shlex.quote(word) for name, value in settings.items() for word in setting_words(name, value)]


def _flat(config: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    for item in fields(config):
        value, before = getattr(config, item.name), getattr(default, item.name)
        if is_dataclass(value):
            yield from _flat(value, before)
        elif item.name not in NOT_SETTINGS:
            yield item.name, value, before


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)
