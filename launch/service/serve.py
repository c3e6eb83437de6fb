"""`serried serve`: the ranks, and a front door that answers for them until it is told to end.

Every process that this module runs in is a rank. The front door is a process of its own (see `front_door`): where a
person starts the command, that one comes first and starts rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import tyro
from rich.console import Console

from runtime import EngineConfig

from ..command.generate import announce, check_model, prepare_kernels
from ..command.models import find_model
from ..command.report import loading_bar
from ..front.front_config import FrontConfig
from ..groups.group import Start, Telling, is_primary
from ..groups.place import GroupFlags
from ..groups.refusal import Refusal, refusals
from .openai_gateway import find_program
from .serve_config import ServeConfig
from .serve_ports import check_ports

ABOUT = """\
Serve a model over gRPC (vllm.grpc.engine.VllmEngine): token ids in, token ids out.

Examples:
  serried serve profiles/models/tiny-v3 --ranks 2 --port 50051
  serried serve MODEL_FOLDER --ranks 8 --openai
  torchrun --standalone --nproc-per-node 4 -m launch serve MODEL_FOLDER

SIGTERM or Ctrl-C lets nothing new in, and ends when what runs has ended.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """What `serried serve` is told."""

    engine: tyro.conf.OmitArgPrefixes[EngineConfig]
    serve: tyro.conf.OmitArgPrefixes[ServeConfig]
    front: tyro.conf.OmitArgPrefixes[FrontConfig] = field(default_factory=FrontConfig)
    group: tyro.conf.OmitArgPrefixes[GroupFlags] = field(default_factory=GroupFlags)

    def __post_init__(self) -> None:
        if self.group.transport == "threads":
            raise ValueError("transport is threads; ranks that serve are processes: leave it out, e.g. auto")
        if self.group.trace is not None:
            raise ValueError("trace is set; a service is traced on demand (StartProfile), see --profile-dir")


def run(flags: ServeFlags, start: Start) -> int:
    """Be one rank of a group that serves; returns the exit code. Raises Refusal for what cannot be run."""
    try:
        from .grpc_access import check_access  # optional, as what follows: they need the extra `serve`
        from .serve_rank import serve_rank
    except ModuleNotFoundError as error:
        raise Refusal(f"{error.name} is not installed, and a service needs it: pip install 'serried[serve]'") from error
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    prepare_kernels(flags.engine)
    with refusals():
        folder = find_model(flags.engine.model)
        check_model(folder, flags.engine)
        if is_primary(start):  # files and programs of the front door's node; the other ranks may lie elsewhere
            check_access(flags.serve)
            check_ports(flags.serve)
            if flags.serve.openai:
                find_program()
    with loading_bar(notes) as progress:
        telling = Telling(say=notes.print, on_plan=lambda plan: announce(plan, notes), on_progress=progress)
        config = replace(flags.engine, model=str(folder))
        return serve_rank(config, flags.serve, flags.front, flags.group, start, telling)
