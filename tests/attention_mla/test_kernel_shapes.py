"""The lists of kernels to compile are whole, and a new number of rows makes no kernel compile again."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import importlib, json, sys
print(json.dumps([
    {
        "title": shape["title"],
        "arguments": shape["kernel"].arg_names,
        "specialised": [p.name for p in shape["kernel"].params if not (p.is_constexpr or p.do_not_specialize)],
        "signature": shape["signature"],
        "constants": list(shape["constants"]),
    }
    for shape in importlib.import_module(sys.argv[1]).kernel_shapes()
]))
"""
FIXED = {"H"}
"""Numbers that are the same in every step: the width of the token table."""


def shapes(room: str) -> list[dict[str, Any]]:
    """In a process of its own: where kernels are interpreted, nothing is known of their arguments."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{room}.kernel_shapes"],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("room", ["attention_mla", "runtime.sampling"])
def test_every_argument_is_named_once_and_no_number_of_rows_is_compiled_in(room: str):
    found = shapes(room)
    assert len({shape["title"] for shape in found}) == len(found) >= 4
    for shape in found:
        assert sorted([*shape["signature"], *shape["constants"]]) == sorted(shape["arguments"]), shape["title"]
        numbers = {name for name, kind in shape["signature"].items() if kind.partition(":")[0] in ("i32", "i64")}
        counts = {name for name in numbers & {*shape["specialised"]} - FIXED if "stride" not in name}
        assert counts == set(), shape["title"]
