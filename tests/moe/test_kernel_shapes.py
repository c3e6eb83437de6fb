"""The lists of kernels to compile: whole, and of kernels that a new number of rows does not make compile again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import importlib, json, sys
entries = importlib.import_module(sys.argv[1]).kernel_shapes()
print(json.dumps([
    {
        "title": entry["title"],
        "arguments": entry["kernel"].arg_names,
        "numbers": [p.name for p in entry["kernel"].params if not (p.is_constexpr or p.do_not_specialize)],
        "signature": entry["signature"],
        "constants": list(entry["constants"]),
    }
    for entry in entries
]))
"""


@pytest.mark.parametrize("room", ["ep", "moe"])
def test_shapes_name_every_argument_once_and_only_strides_are_specialised(room: str) -> None:
    """In a process of its own: where kernels are interpreted, nothing is known of their arguments."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{room}.kernel_shapes"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    entries = json.loads(found.stdout)
    assert len({entry["title"] for entry in entries}) == len(entries) > 5
    for entry in entries:
        named = [*entry["signature"], *entry["constants"]]
        assert sorted(named) == sorted(entry["arguments"]), entry["title"]
        numbers = [name for name in entry["numbers"] if not name.endswith("_ptr")]
        assert [name for name in numbers if not name.endswith("_stride")] == [], entry["title"]
