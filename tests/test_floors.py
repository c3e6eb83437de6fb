"""The house: which room may import which, read from the source with `ast` and held against one table.

5  launch
4  runtime
3  eplb
2  moe, dbo, attention_mla   (do not know each other)
1  ep
"""

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOORS = {
    "launch": {"runtime", "eplb", "moe", "dbo", "attention_mla", "ep"},
    "runtime": {"eplb", "moe", "dbo", "attention_mla", "ep"},
    "eplb": {"moe", "ep"},
    "moe": {"ep"},
    "dbo": {"ep"},
    "ep": set(),
    "attention_mla": {"ep"},
}
"""Room -> the rooms it may import."""

STAIRS = {
    "runtime": (
        "model", "weights", "costs", "requests", "sampling", "kv", "control", "scheduling", "failure", "forward",
        "graphs", "loop", "ranks", "settings", "", "planning", "bench", "simulation",
    ),
    "launch": ("groups", "command", "lab", "plan", "bench", "observe", "front", "service", ""),
}  # fmt: skip
"""Room -> its parts, lowest first: a part imports from itself and from those before it. "" is what lies in no part."""

ENVIRONMENT = {("os", "environ"), ("os", "environb"), ("os", "getenv"), ("os", "putenv"), ("os", "unsetenv")}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.save",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_pyobj",
    "send_pyobj",
    "recv_object_list",
}


@dataclass(frozen=True)
class Import:
    """One import statement's target; `module` is dotted, and "" for `from . import x`. `level` counts leading dots."""

    file: str
    line: int
    module: str
    level: int
    inside_function: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {'.' * self.level}{self.module}"


def imports_of(source: str, file: str) -> list[Import]:
    """Every import in `source`, however deep it hides; `import_module("x")` with a literal counts too."""
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(file, node.lineno, alias.name, 0, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append(Import(file, node.lineno, node.module or "", node.level, inside))
        elif isinstance(node, ast.Call) and (name := imported_by_call(node)):
            found.append(Import(file, node.lineno, name, 0, inside))
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def imported_by_call(call: ast.Call) -> str | None:
    """The module that `import_module("x")` or `__import__("x")` names; None for other calls."""
    if dotted(call.func).split(".")[-1] not in ("import_module", "__import__"):
        return None
    return str(call.args[0].value) if call.args and isinstance(call.args[0], ast.Constant) else None


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; the part that is not a plain name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def floor_faults(room: str, found: list[Import]) -> list[str]:
    """Every import of `found`, in a file of `room`, that the table does not allow."""
    faults = []
    for item in found:
        if item.level >= len(Path(item.file).parts) or (item.level == 0 and item.top == room):
            faults.append(f"{item}: inside a room imports are relative and stay in the room")
        elif item.level and (fault := stair_fault(room, item)):
            faults.append(fault)
        elif item.level == 0 and item.top in FLOORS and item.top not in FLOORS[room]:
            faults.append(f"{item}: {room} may import {sorted(FLOORS[room]) or 'no room'}")
        elif item.level == 0 and item.top in FLOORS and item.inside_function:
            faults.append(f"{item}: an import between rooms is hidden in a function")
        elif item.level == 0 and item.top in ("profiles", "tests"):
            faults.append(f"{item}: nothing imports data or tests")
    return faults


def stair_fault(room: str, item: Import) -> str | None:
    """What is wrong with a relative import between the parts of a room; None where `STAIRS` allows it."""
    parts = STAIRS.get(room)
    if parts is None or Path(item.file).name in ("__init__.py", "__main__.py"):
        return None
    mine = Path(item.file).parts[1] if len(Path(item.file).parts) == 3 else ""
    first = item.module.split(".")[0]
    theirs = mine if item.level == 1 and mine else (first if first in parts else "")
    if parts.index(theirs) > parts.index(mine):
        return f"{item}: {mine or room} comes before {theirs or room} in {room}"
    return None


def environment_faults(source: str, file: str) -> list[str]:
    """Every place where `source` touches environment variables."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and tuple(dotted(node).split(".")[-2:]) in ENVIRONMENT:
            faults.append(f"{file}:{node.lineno} reads {dotted(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            faults += [
                f"{file}:{node.lineno} imports {alias.name} from os"
                for alias in node.names
                if ("os", alias.name) in ENVIRONMENT
            ]
    return faults


def unsafe_faults(source: str, file: str) -> list[str]:
    """Every way in `source` to run what a file or a peer says."""
    faults = [f"{item}" for item in imports_of(source, file) if item.top in UNSAFE_MODULES]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in UNSAFE_CALLS or name.split(".")[-1] in UNSAFE_CALLS - {"eval", "exec"}:
                faults.append(f"{file}:{node.lineno} calls {name}")
    return faults


def room_files() -> list[tuple[str, Path]]:
    return [(room, path) for room in FLOORS for path in sorted((ROOT / room).rglob("*.py"))]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_run_down_the_floors_only():
    faults = []
    for room, path in room_files():
        faults += floor_faults(room, imports_of(path.read_text("utf-8"), named(path)))
    assert not faults, "\n".join(faults)


def test_every_part_of_a_room_has_its_stair():
    for room, parts in STAIRS.items():
        folders = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
        assert folders == set(parts) - {""}


def test_the_table_itself_has_no_cycle():
    def below(room: str) -> set[str]:
        return FLOORS[room].union(*(below(under) for under in FLOORS[room]))

    assert [room for room in FLOORS if room in below(room)] == []


def test_environment_variables_are_read_in_launch_only():
    faults = []
    for room, path in room_files():
        if room != "launch":
            faults += environment_faults(path.read_text("utf-8"), named(path))
    assert not faults, "\n".join(faults)


def test_nothing_in_the_rooms_runs_what_data_says():
    faults = []
    for _, path in room_files():
        faults += unsafe_faults(path.read_text("utf-8"), named(path))
    assert not faults, "\n".join(faults)


def test_the_top_level_holds_the_rooms_and_no_drawer_for_the_rest():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    folders = {Path(name).parts[0] for name in listed.stdout.splitlines() if len(Path(name).parts) > 1}
    assert folders - {"tests", "profiles"} == set(FLOORS)
    drawers = {"common", "utils", "util", "helpers", "misc", "shared"}
    assert [named(path) for _, path in room_files() if drawers & {path.stem, *path.relative_to(ROOT).parts}] == []


@pytest.mark.parametrize(
    ("room", "source", "fault"),
    [
        ("moe", "import runtime", "moe may import ['ep']"),
        ("moe", "from dbo.tracks import drive", "moe may import ['ep']"),
        ("ep", "def f():\n    import moe", "ep may import no room"),
        ("attention_mla", "from moe import Mlp", "attention_mla may import ['ep']"),
        ("runtime", "def f():\n    from ep import Tag", "hidden in a function"),
        ("runtime", "import importlib\nimportlib.import_module('launch.cli')", "runtime may import"),
        ("moe", "from moe.config import MoeConfig", "relative"),
        ("moe", "from ..ep import Tag", "relative"),
        ("runtime/model", "from ...ep import Tag", "relative"),
        ("runtime/model", "from ..weights.memory import plan_memory", "model comes before weights in runtime"),
        ("runtime", "from .bench.workload import Workload", "runtime comes before bench in runtime"),
        ("launch/groups", "from .. import cli", "groups comes before launch in launch"),
        ("launch", "import tests.oracle", "nothing imports data or tests"),
    ],
)
def test_a_forbidden_import_is_seen(room, source, fault):
    faults = floor_faults(room.split("/")[0], imports_of(source, f"{room}/planted.py"))
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("runtime", "import torch\nfrom ep import Tag\nfrom .config import EngineConfig"),
        ("launch", "def f():\n    from .commands import run_command"),
        ("eplb", "from moe import ExpertPlacement"),
        ("runtime/weights", "from ..model.model_config import ModelConfig\nfrom .memory import MemoryPlan"),
        ("runtime", "from .settings.config import EngineConfig"),
        ("launch/plan", "from ..command.models import find_model"),
    ],
)
def test_an_allowed_import_passes(room, source):
    assert floor_faults(room.split("/")[0], imports_of(source, f"{room}/planted.py")) == []


@pytest.mark.parametrize("source", ["import os\nos.environ['A']", "from os import getenv", "import os\nos.getenv('A')"])
def test_a_read_of_the_environment_is_seen(source):
    assert len(environment_faults(source, "planted.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "d.all_gather_object(a, b)",
        "socket.recv_pyobj()",
    ],
)
def test_a_way_to_run_data_is_seen(source):
    assert len(unsafe_faults(source, "planted.py")) == 1


def test_a_method_called_eval_is_no_fault():
    assert unsafe_faults("model.eval()", "planted.py") == []
