"""`serried plan --from-vllm 'vllm serve ...'`: a command line for vLLM, flag by flag, as one for serried.

Nothing of it is run. What comes out is read by the same parser as any command here, so what is printed is accepted;
then it is planned and judged like any other plan, where the model is known.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from runtime.model.json_file import parse_json
from runtime.settings.config import EngineConfig

from ..command.config_profile import setting_words
from ..command.generate import GenerateFlags
from ..command.models import PROFILES
from ..command.parsing import parse_flags
from ..command.vllm_flags import ALIASES, MODELS, NOT_SAME_MODEL, RULES, Rule, Settings, whole
from ..groups.refusal import refusals
from .plan_memory import lines, make_report, tell_warnings

ABOUT = """\
Translate a command line of vLLM, flag by flag, and say what has no counterpart.

Examples:
  serried plan --from-vllm 'vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 32 --enable-expert-parallel'
  serried plan --from-vllm 'vllm serve MODEL -tp 8 --enable-eplb --max-num-seqs 256 --kv-cache-dtype fp8' --context 2048

Where the model is one of profiles/models, what comes out is planned as serried plan would.
"""

DONE = 0
FAILED = 1
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_SAID = 48
SIZES = ("data-parallel-size", "tensor-parallel-size", "data-parallel-size-local")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlags:
    """What `serried plan --from-vllm` is told."""

    command: str
    """The whole command line, in quotes."""

    gpu: str = "h200"
    """Device of each rank: a name in profiles/hardware."""

    context: int | None = None
    """Prompt and output of one request, in tokens; unset: 4096, or the model's longest."""

    json: Switch = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One flag: as it was said, what it is here, what kind of answer that is, and why."""

    said: str
    here: str
    kind: str
    why: str


@dataclass(slots=True, kw_only=True)
class Translation:
    """A command line, as far as it has been read. `settings` are the engine's, `door` those of serried serve."""

    model: str = ""
    lines: list[Line] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    door: Settings = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Every GPU is one."""
        return self.sizes.get("data-parallel-size", 1) * self.sizes.get("tensor-parallel-size", 1)

    @property
    def words(self) -> list[str]:
        """The settings as flags, ranks first."""
        settings: Settings = {"ranks": self.ranks, **self.settings}
        local = self.sizes.get("data-parallel-size-local")
        if local is not None:
            settings["node_size"] = local * self.sizes.get("tensor-parallel-size", 1)
        return [word for name, value in settings.items() for word in setting_words(name, value)]

    @property
    def known_model(self) -> str | None:
        """The configuration in profiles/models, or a folder's own name, that this is; None where it is not known."""
        name = self.model.rstrip("/").split("/")[-1].lower()
        if name.startswith(NOT_SAME_MODEL):
            return None
        found = [begin for begin in MODELS if name.startswith(begin)]
        if found:
            return MODELS[max(found, key=len)]
        known = (PROFILES / "models" / name).is_dir() or (PROFILES / "models" / f"{name}.json").is_file()
        return name if known else None


def run(flags: VllmFlags) -> int:
    """Print the translation; returns 0, or 1 where it is planned and does not fit. Raises Refusal for what is no such
    command line, or has values that are refused here."""
    with refusals():
        found = translate(flags.command)
    engine = _checked(found)
    report = None
    if engine is not None:
        with refusals():
            report = make_report(engine, gpu=flags.gpu, context=flags.context, tpot_ms=None, ttft_ms=None)
    if flags.json:
        print(
            json.dumps(record(found, list(report.warnings) if report else [], list(report.misfits) if report else []))
        )
        return FAILED if report is not None and report.misfits else DONE
    out, notes = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    for line in [*flag_lines(found.lines), "", command_line(found), *folder_lines(found.model), ""]:
        out.print(line, markup=False)
    if report is None:
        out.print(
            f"{found.model} is not in profiles/models, so nothing is planned; see serried plan FOLDER", markup=False
        )
        return DONE
    for line in lines(report):
        out.print(line, markup=False)
    tell_warnings(report, notes)
    return FAILED if report.misfits else DONE


def translate(command: str) -> Translation:
    """Raises ValueError for what is no `vllm serve` command line, or a value that none of its flags takes."""
    words = [word for word in shlex.split(command) if "=" not in word or not word.split("=")[0].isupper()]
    if words[:2] == ["vllm", "serve"]:
        words = words[2:]
    elif words[:1] == ["serve"]:
        words = words[1:]
    else:
        raise ValueError(f"{command!r} is no vLLM server; it must begin with vllm serve, e.g. vllm serve MODEL -dp 8")
    found = Translation()
    for name, rule, values in _flags(words, found):
        _take(found, name, rule, values)
    if not found.model:
        raise ValueError(f"{command!r} names no model; e.g. vllm serve deepseek-ai/DeepSeek-V3 -dp 8")
    redundant = found.settings.get("num_redundant_experts", 0)
    if redundant and not found.settings.get("enable_eplb"):
        found.settings["enable_eplb"] = True
        found.lines.append(
            Line(said="", here="--enable-eplb", kind="same", why="copies need somebody who chooses them")
        )
    return found


def command_line(found: Translation) -> str:
    """What serves the same: vLLM's server speaks OpenAI's API, on GPUs."""
    door = {"openai_port": 8000, **found.door}
    device = [] if "device" in found.settings else ["--device", "cuda"]
    words = [found.model, *found.words, *device, "--openai"]
    return f"serried serve {shlex.join([*words, *(word for item in door.items() for word in setting_words(*item))])}"


def folder_lines(model: str) -> list[str]:
    """Nothing is ever fetched: a hub's name must become a folder first."""
    return [] if Path(model).is_dir() else [f"(nothing is downloaded: put the checkpoint's folder for {model})"]


def flag_lines(found: Sequence[Line]) -> list[str]:
    """A line a flag: what was said, what it is here, and why."""
    width = max([len(line.said) for line in found if len(line.said) <= _SAID], default=0)
    lines_ = []
    for line in found:
        here = line.here or {"always": "(always so)", "elsewhere": "(elsewhere)"}.get(line.kind, "(no counterpart)")
        lines_.append(f"{line.said:<{width}}  ->  {here}" + (f"   # {line.why}" if line.why else ""))
    return lines_


def record(found: Translation, warnings: Sequence[str], misfits: Sequence[str]) -> dict[str, Any]:
    """For a program."""
    return {
        "model": found.model,
        "command": command_line(found),
        "words": found.words,
        "flags": [{"said": each.said, "here": each.here, "kind": each.kind, "why": each.why} for each in found.lines],
        "no_counterpart": [each.said for each in found.lines if each.kind == "none"],
        "warnings": list(warnings),
        "misfits": list(misfits),
    }


def _flags(words: Sequence[str], found: Translation) -> Iterator[tuple[str, Rule, list[str]]]:
    """Each flag with its rule and values; a word without a flag before it is the model."""
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            found.model = found.model or word
            continue
        name, is_joined, joined = word.lstrip("-").partition("=")
        name = ALIASES.get(name, name.replace("_", "-"))
        rule = _rule(name, words[place : place + 1])
        values = [joined] if is_joined else []
        while not is_joined and place < len(words) and _takes(rule, len(values)) and not words[place].startswith("--"):
            values.append(words[place])
            place += 1
        if name == "model":
            found.model = values[0] if values else ""
        else:
            yield name, rule, values


def _rule(name: str, following: Sequence[str]) -> Rule:
    """Of a flag; dotted parts of a JSON flag count as that flag, and what is not known as one with a value if any."""
    if name in RULES:
        return RULES[name]
    if name.startswith("eplb-config."):
        return Rule(kind="same", means=lambda text: _dotted_eplb(name, text))
    head = name.split(".")[0]
    if head in RULES:
        return RULES[head]
    has_value = name == "model" or (bool(following) and not following[0].startswith("-"))
    return Rule(kind="none", says="not known here", values=1 if has_value else 0)


def _dotted_eplb(name: str, text: str) -> Settings:
    means = RULES["eplb-config"].means
    assert means is not None
    part = name.split(".", 1)[1].replace("-", "_")
    return means(json.dumps({part: parse_json(text.encode())}))


def _takes(rule: Rule, taken: int) -> bool:
    return rule.values < 0 or taken < rule.values


def _take(found: Translation, name: str, rule: Rule, values: list[str]) -> None:
    said = " ".join([f"--{name}", *values])
    if _takes(rule, len(values)) and rule.values > 0:
        raise ValueError(f"--{name} needs a value; vLLM would refuse it, too")
    if name in SIZES:
        found.sizes[name] = whole(values[0])
        here = "--node-size" if name.endswith("local") else f"--ranks {found.ranks}"
        found.lines.append(Line(said=said, here=here, kind="same", why=rule.says))
        return
    settings: Settings = {}
    if rule.means is not None:
        try:
            settings = rule.means(values[0] if values else "")
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from error
    kind, why = rule.kind, rule.says
    if rule.door:
        settings = {rule.door: values[0]}
        found.door.update(settings)
    else:
        found.settings.update(settings)
    here = " ".join([word for key, value in settings.items() for word in setting_words(key, value)])
    found.lines.append(Line(said=said, here=here, kind=kind, why=why))


def _checked(found: Translation) -> EngineConfig | None:
    """What the parser of commands here makes of it; None where the model is not known. Raises Refusal as it would."""
    known = found.known_model
    engine: EngineConfig = parse_flags(
        GenerateFlags, [known or "MODEL", *found.words], name="plan --from-vllm", about=ABOUT
    ).engine
    return engine if known else None
