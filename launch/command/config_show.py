"""`serried config`: every setting with its value, and where it comes from.

    default    nothing was said
    model      the model's own configuration says so
    hardware   decided for the device: what kernels it has, what fits, what travels how
    profile    the file of --profile
    flag       the command line

Decides as the engine would; loads nothing and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from runtime.model.model_config import ModelConfig, read_model_config
from runtime.settings.config import EngineConfig
from runtime.settings.decisions import longest_request, run_dtype, settle_exchange
from runtime.settings.kernel_choice import choose_ops
from runtime.settings.memory_numbers import memory_numbers
from runtime.weights.hardware import read_hardware
from runtime.weights.memory import MemoryPlan, plan_memory

from ..groups.place import GroupFlags
from ..groups.refusal import refusals
from .config_profile import Origins
from .models import find_hardware, find_model

ABOUT = """\
Print every setting, its value, and where it comes from: default, model, hardware, profile or flag.

Examples:
  serried config deepseek-v3 --ranks 32 --gpu h200
  serried config deepseek-v3 --profile profiles/deploy/v3-h200-32.toml --max-num-seqs 32
  serried config profiles/models/tiny-v3 --json
"""

DONE = 0
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """What `serried config` is told: what `generate` would be."""

    engine: tyro.conf.OmitArgPrefixes[EngineConfig]
    group: tyro.conf.OmitArgPrefixes[GroupFlags] = field(default_factory=GroupFlags)

    gpu: str | None = None
    """Device to decide for: a name in profiles/hardware; unset: --hardware, else cpu with --device cpu, else h200."""

    json: Switch = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line."""

    name: str
    value: Any
    source: str


def run(flags: ConfigFlags, origins: Origins) -> int:
    """Print them; returns 0. Raises Refusal for what cannot run."""
    with refusals():
        settings, fits = settings_of(flags, origins)
    if flags.json:
        print(json.dumps({each.name: {"value": _plain(each.value), "source": each.source} for each in settings}))
        return DONE
    out = Console(highlight=False, soft_wrap=True)
    width = max([len(each.name) for each in settings])
    for each in settings:
        out.print(f"{each.name:<{width}}  {_word(each.value):<14} {each.source}", markup=False)
    if fits:
        out.print(f"note: {fits}", markup=False)
    return DONE


def settings_of(flags: ConfigFlags, origins: Origins) -> tuple[list[Setting], str]:
    """All settings in the order of --help, and why they cannot run, if they cannot."""
    model = read_model_config(find_model(flags.engine.model))
    decided, plan = _decide(flags, model)
    misfit = ""
    try:
        plan.check_fits()
    except ValueError as error:
        misfit = str(error)
    lines = []
    for name, value, default in [*_flat(flags.engine, EngineConfig(model="")), *_flat(flags.group, GroupFlags())]:
        source = _source(name, value, default, origins)
        if name in decided and value in ("auto", None):
            lines.append(Setting(name=name, value=decided[name][0], source=decided[name][1]))
        else:
            lines.append(Setting(name=name, value=value, source=source))
    return lines, misfit


def _decide(flags: ConfigFlags, model: ModelConfig) -> tuple[dict[str, tuple[Any, str]], MemoryPlan]:
    """What is left open, and by whom it is decided."""
    engine = flags.engine
    hardware = read_hardware(find_hardware(_device_name(flags)))
    on_gpu = engine.device == "cuda" or _device_name(flags) != "cpu"
    settled, why = settle_exchange(engine, model, local_size=None, on_gpu=on_gpu)
    longest = longest_request(engine, model)
    dtype = run_dtype(engine, model)
    numbers = memory_numbers(
        engine, model, device_bytes=_rank_bytes(hardware.memory_bytes, engine, on_gpu), on_gpu=on_gpu
    )
    plan = plan_memory(model, replace(numbers, max_model_len=longest))
    device = torch.device("cuda" if on_gpu else "cpu")
    ops = choose_ops(engine.ops, device=device, dtype=dtype, page_size=engine.cache.block_size)
    decided = {
        "dtype": (str(dtype).removeprefix("torch."), "model"),
        "max_model_len": (longest, "model"),
        "ops": (ops, "hardware"),
        "exchange": (settled.exchange.exchange, "hardware"),
        "hierarchical": (settled.exchange.hierarchical, f"hardware ({why})"),
        "num_blocks": (plan.num_pages, "hardware"),
        "kv_cache_memory_bytes": (plan.cache_bytes, "hardware"),
    }
    if engine.node_size is None:
        decided["node_size"] = (settled.node_size, "default (all ranks; a launcher may say otherwise)")
    return decided, plan


def _device_name(flags: ConfigFlags) -> str:
    if flags.gpu is not None:
        return flags.gpu
    return "cpu" if flags.engine.device == "cpu" else "h200"


def _rank_bytes(device_bytes: int, engine: EngineConfig, on_gpu: bool) -> int:
    """A GPU is one rank's; a CPU's memory is everybody's."""
    return device_bytes if on_gpu else device_bytes // engine.ranks


def _source(name: str, value: Any, default: Any, origins: Origins) -> str:
    if name in origins.flags or (name == "model" and value != default):
        return "flag"
    if name in origins.profile:
        return f"profile ({origins.profile[name]})"
    return "default"


def _flat(config: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    for item in fields(config):
        value, before = getattr(config, item.name), getattr(default, item.name)
        if is_dataclass(value):
            yield from _flat(value, before)
        else:
            yield item.name, value, before


def _word(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
