"""The repository as a stranger finds it: README's map is true, nothing names one machine, the wheel has the rooms."""

import ast
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["ep", "attention_mla", "moe", "eplb", "dbo", "runtime", "launch"]

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|root|home|farm|Users|mnt|tmp/bash_jobs)/[\w.-]")


def tracked() -> list[Path]:
    """Files under version control, and those about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def modules() -> set[str]:
    """`room/module` of every module of the rooms; `__init__` goes without saying."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.stem != "__init__"]
    return {path.relative_to(ROOT).with_suffix("").as_posix() for path in paths}


def mapped(readme: str) -> set[str]:
    """`room/module` of every module that the map in README names: a table row a room, modules in backticks."""
    found = set()
    for room, cells in re.findall(r"^\| `([\w/]+)/` \|(.*)\|$", readme, flags=re.MULTILINE):
        found |= {f"{room}/{name}" for name in re.findall(r"`(\w+)`", cells)}
    return found


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_the_map_in_readme_names_every_module_and_no_other():
    on_the_map = mapped((ROOT / "README.md").read_text("utf-8"))
    assert {"missing from README": modules() - on_the_map, "only in README": on_the_map - modules()} == {
        "missing from README": set(),
        "only in README": set(),
    }


def test_a_map_row_is_read_as_room_and_modules():
    assert mapped("| `ep/` | `layout` index math; `errors` |\n| other | `x` |\n") == {"ep/layout", "ep/errors"}


def test_no_tracked_file_names_a_path_of_one_machine():
    faults = []
    for path in tracked():
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        faults += [
            f"{path.relative_to(ROOT)}:{n}: {line}" for n, line in enumerate(lines, 1) if MACHINE_PATHS.search(line)
        ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("line", "seen"), [("open('/ro" + "ot/x')", True), ("a/work/b", False), ("/usr/bin/env", False)]
)
def test_a_path_of_one_machine_is_seen(line, seen):
    assert bool(MACHINE_PATHS.search(line)) == seen


CALLED_FROM_OUTSIDE = {"add_registered_method_handlers", "_to_string"}
"""By a library, under a name that it chose."""


def unused(sources: dict[str, str]) -> list[str]:
    """Functions, methods, classes and constants of the rooms whose names stand nowhere but where they are defined."""
    words = Counter(word for text in sources.values() for word in re.findall(r"\w+", text))
    found = []
    for file, text in sources.items():
        if file.split("/")[0] not in ROOMS:
            continue
        tree = ast.parse(text)
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
        found += [f"{file}: {name}" for name in names if words[name] == 1 and not name.startswith("__")]
    return found


def test_nothing_is_defined_that_nobody_names():
    sources = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in tracked() if path.suffix == ".py"}
    assert [name for name in unused(sources) if name.split(": ")[1] not in CALLED_FROM_OUTSIDE] == []


def test_what_nobody_names_is_seen():
    text = "MOST = 3\nLEAST: int = 1\n\nclass Box:\n    def full(self): return LEAST\n"
    assert unused({"ep/x.py": text, "tests/y.py": "Box()"}) == ["ep/x.py: full", "ep/x.py: MOST"]


def test_no_file_says_where_packages_come_from():
    text = "".join(
        (ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run")
    )
    assert re.findall(r"https?://|index-url|find-links|file:", text) == []


def test_the_wheel_lists_exactly_the_seven_rooms_and_their_parts():
    setuptools = pyproject()["tool"]["setuptools"]
    assert setuptools["packages"][: len(ROOMS)] == ROOMS
    assert setuptools["package-dir"] == {"": "."}
    parts = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).glob("*/*.py")}
    assert sorted(setuptools["packages"][len(ROOMS) :]) == sorted(".".join(part.parts) for part in parts)
    assert all((ROOT / part / "__init__.py").is_file() for part in parts)


def test_every_requirement_is_pinned_by_the_constraints_within_its_range():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {Requirement(line).name.lower(): Requirement(line) for line in lines if line and not line.startswith("#")}
    assert all([spec.operator for spec in pin.specifier] == ["=="] for pin in pins.values())
    project = pyproject()["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        wanted = Requirement(text)
        [pin] = pins[wanted.name.lower()].specifier
        assert wanted.specifier.contains(pin.version), f"{text} does not allow the pinned {pin}"


def test_every_room_and_module_opens_with_what_it_is_for():
    bare = [name for name in sorted(modules()) if not (ROOT / f"{name}.py").read_text("utf-8").startswith('"""')]
    assert bare == []
