"""Bad input through the whole command, in this process: the exact line, exit code 2, and nothing on standard output."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from launch import cli
from launch.cli import main
from launch.commands import COMMANDS


@pytest.fixture
def refused(capsys):
    """refused(*words) -> the one line that `serried` says when it refuses."""

    def run(*words: str) -> str:
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        [line] = said.err.splitlines()[-1:]
        assert line.startswith("serried: ")
        return line.removeprefix("serried: ")

    return run


@pytest.fixture
def requests_file(tmp_path):
    """requests_file(*lines) -> path of a JSON-lines file with them."""

    def write(*lines: dict) -> str:
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        return str(path)

    return write


def test_no_command_shows_what_there_is(capsys):
    assert main([]) == 2
    assert "serried generate" in capsys.readouterr().out


def test_help_ends_well(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "serried plan deepseek-v3 --gpus 32" in said
    assert [name for name in cli.COMMANDS if not re.search(rf"^  {name} +[A-Z]", said, re.MULTILINE)] == []


def test_the_version_is_one_line(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"serried \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_command_is_refused_by_name(refused):
    assert refused("generte", "m") == (
        "'generte' is not a command; the commands are "
        "bench, config, doctor, eplb, generate, plan, serve, shard, simulate, top, "
        "e.g. serried plan --help"
    )


def test_an_unknown_model_is_refused_with_the_name_that_was_meant(refused):
    assert refused("generate", "tiny-v4", "--prompt", "a") == (
        "'tiny-v4' is not a folder or file, nor a model in profiles/models; did you mean tiny-v3?"
    )


def test_a_folder_without_a_config_is_refused(refused, tmp_path):
    line = refused("plan", str(tmp_path))
    assert line == f"{tmp_path / 'config.json'} does not exist; a model is a folder with config.json, or a .json file"


def test_nothing_to_decode_is_refused(refused, tiny):
    assert refused("generate", tiny) == (
        "there is nothing to decode: give --prompt TEXT, or --prompts FILE with one JSON object a line"
    )


def test_a_missing_file_of_prompts_is_named(refused, tiny, tmp_path):
    assert refused("generate", tiny, "--prompts", str(tmp_path / "none.jsonl")) == (
        f"{tmp_path / 'none.jsonl'}: No such file or directory"
    )


def test_text_for_a_model_without_a_tokenizer_is_refused(refused):
    line = refused("generate", "deepseek-v2-lite", "--load-format", "dummy", "--prompt", "a")
    assert re.fullmatch(
        r"--prompt 1: .*deepseek-v2-lite\.json has no tokenizer\.json, so text cannot be read; give token ids in a "
        r'file of --prompts, e\.g\. \{"prompt_token_ids": \[1, 2, 3\]\}',
        line,
    )


def test_an_empty_prompt_is_refused(refused, tiny):
    assert (
        refused("generate", tiny, "--prompt", "", "--num-blocks", "64")
        == "--prompt 1: prompt = []: must hold at least one token, e.g. [1]"
    )


def test_a_token_id_of_the_vocabularys_size_is_refused(refused, tiny, requests_file):
    file = requests_file({"prompt_token_ids": [1]}, {"prompt_token_ids": [0, 2048]})
    assert refused("generate", tiny, "--prompts", file, "--num-blocks", "64") == (
        f"{file}:2: prompt[1] = 2048: must be a token id from 0 to 2047, the vocabulary's last, e.g. 2047"
    )


def test_top_p_above_one_in_a_file_is_refused(refused, tiny, requests_file):
    file = requests_file({"prompt": "a", "top_p": 1.5})
    assert refused("generate", tiny, "--prompts", file) == (
        f"{file}:1: top_p = 1.5: must be a number above 0 and at most 1, for example 1.0"
    )


def test_a_prompt_longer_than_the_cache_is_refused_with_the_arithmetic(refused, tiny):
    line = refused("generate", tiny, "--prompt", "a b c " * 60, "--block-size", "16", "--num-blocks", "4")
    assert re.fullmatch(
        r"--prompt 1: prompt = '181 tokens': with up to 16 tokens of output it needs 13 pages of 16 tokens, and the "
        r"whole cache has 4 \(64 tokens\); a prompt of 63 tokens would fit",
        line,
    )


def test_more_ranks_than_experts_are_refused_with_how_many_would_fit(refused, tiny):
    line = refused("generate", tiny, "--prompt", "a", "--ranks", "33")
    assert "33" in line
    assert "32" in line


def test_what_is_wrong_with_the_model_is_said_before_its_tokenizer(refused, tmp_path):
    assert "is a configuration without weights; give a checkpoint's folder" in refused(
        "generate", "deepseek-v3", "--prompt", "hi"
    )
    assert "config.json" in refused("generate", str(tmp_path), "--prompt", "hi")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("simulate", "--ranks", "100000"), "ranks is 100000; it must be from 1 to 320"),
        (("generate", "tiny-v3", "--start-timeout", "inf"), "start_timeout is inf; it must be above 0 and at most"),
        (("generate", "tiny-v3", "--flight-dir", __file__), "a file; it must be a folder"),
    ],
)
def test_values_that_would_only_fail_later_are_refused(refused, words, message):
    assert message in refused(*words)


def test_help_of_a_command_of_two_words_lists_them(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for name in (each.removeprefix("bench ") for each in COMMANDS if each.startswith("bench ")):
        assert re.search(rf"^  {name} +[A-Z].{{30,}}\.$", said, re.MULTILINE), name


def test_a_terminal_gets_the_same_line_as_a_pipe():
    """The parser colours its boxes where standard error is a terminal."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "launch", "generate", "tiny-v3", "--nonsense"]
    with subprocess.Popen(words, stderr=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal is gone when the process is
            while part := os.read(ours, 4096):
                said += part
    os.close(ours)
    assert process.returncode == 2
    assert said.decode().strip() == "serried: unrecognized options: --nonsense (serried generate --help)"
