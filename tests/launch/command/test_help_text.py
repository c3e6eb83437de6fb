"""Help in boxes becomes plain text: every word stays, lines end where the width ends."""

import re

import pytest

from launch.command.help_text import plain_help, without_none
from launch.command.parsing import WIDEST
from launch.command.vllm_flags import of_vllm
from launch.commands import COMMANDS, parse_flags

BOXES = """\
usage: serried x [-h] [--size {None}|INT]

About it.

╭─ options ─────────────────────────╮
│ What it is told,                  │
│ in two lines.                     │
│ ───────────────────────────────── │
│ -h, --help     show this          │
│ --size {None}|INT                 │
│                How large it       │
│                is; unset: as it   │
│                comes.             │
│                (default: None)    │
╰───────────────────────────────────╯
"""


def test_a_box_becomes_a_heading_what_it_is_and_a_paragraph_for_each_flag():
    assert plain_help(BOXES, width=70).splitlines() == [
        "usage: serried x [-h] [--size INT]",
        "",
        "About it.",
        "",
        "options:",
        "  What it is told, in two lines.",
        "  -h, --help              show this",
        "  --size INT              How large it is; unset: as it comes.",
    ]


def test_a_flag_that_is_too_long_for_its_column_has_a_line_of_its_own():
    long = BOXES.replace("--size {None}|INT  ", "--a-very-long-name-it-has  ")
    assert "  --a-very-long-name-it-has\n" + " " * 26 + "How large" in plain_help(long, width=70)


def test_text_without_boxes_stays():
    assert plain_help("usage: x\n\nwords\n", width=20) == "usage: x\n\nwords\n"


def test_a_flag_that_may_be_unset_takes_what_it_takes():
    assert without_none("--size {None}|INT  --dir {None}|PATH") == "--size INT  --dir PATH"


@pytest.mark.parametrize("name", sorted(COMMANDS))
@pytest.mark.parametrize("columns", ["60", "200"])
def test_no_flag_of_any_command_is_lost_or_drawn(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    command = COMMANDS[name]
    with pytest.raises(SystemExit):
        parse_flags(command.flags, ["--help"], name=name, about=command.about)
    text = capsys.readouterr().out
    assert not re.search(r"[│─╭╯]|\{None\}", text)
    assert "docstring" not in text
    options = text[text.index("\noptions:\n") :]
    short = [
        line
        for line in options.splitlines()
        if len(line) < min(int(columns), WIDEST) - 45 and line.startswith(" " * 26)
    ]
    ends = [line for line in short if not line.rstrip().endswith((")", ".", "'')"))]
    assert not ends, f"lines that end early: {ends}"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--tensor-parallel-size", "is said otherwise here: MLA keeps one latent"),
        ("-dp", "is said otherwise here: each GPU is a rank: --ranks"),
        ("--trust_remote_code", "has no counterpart here: no code of a checkpoint"),
        ("--enable-expert-parallel", "need not be said here: experts are always spread"),
        ("--port", "is said otherwise here: --openai-port of serried serve"),
    ],
)
def test_a_flag_of_vllm_is_met_with_what_it_is_here(word, said):
    line = of_vllm(word)
    assert line is not None
    assert line.startswith(f"{word} is a flag of vLLM that ")
    assert said in line
    assert "serried plan --from-vllm" in line


@pytest.mark.parametrize("word", ["--frobnicate", "-z"])
def test_any_other_flag_is_not_taken_for_one_of_vllm(word):
    assert of_vllm(word) is None
