import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from launch.cli import main

ROOT = Path(__file__).resolve().parents[3]
PROMPT = 'The "assert" statement'
SMALL = ("--num-blocks", "64")


def start(*words: str) -> "subprocess.Popen[str]":
    """`serried` in a process of its own, as a person runs it."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_text_is_the_same_on_four_ranks_and_on_one_in_float32(capsys, tiny):
    words = ["generate", tiny, "--prompt", PROMPT, "--dtype", "float32", "--temperature", "0", "--max-tokens", "24"]
    assert main([*words, *SMALL, "--ranks", "4", "--table"]) == 0
    four = capsys.readouterr()
    assert main([*words, *SMALL, "--ranks", "1"]) == 0
    one = capsys.readouterr()
    assert four.out == one.out
    assert four.out.startswith(f"=== 0 (rank 0)\n{PROMPT}")
    assert four.out.endswith("[24 tokens, length]\n\n")
    assert "tokens/s on 4 ranks\n" in four.err
    assert "preempted" in four.err
    assert "tokens/s on 1 rank\n" in one.err
    assert "preempted" not in one.err


def test_the_memory_plan_is_said_before_the_first_token(capsys, tiny):
    assert main(["generate", tiny, "--prompt", PROMPT, "--max-tokens", "1", *SMALL]) == 0
    said = capsys.readouterr().err
    assert said.index("weights per rank") < said.index("latent cache") < said.index("tokens/s")
    assert "(64 pages of 64 tokens, 4,608 B a token)" in said


@pytest.fixture(scope="module")
def records(tiny, tmp_path_factory):
    """Standard output of one run with --json, parsed line by line: a prompt of the command line, two of a file."""
    file = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    file.write_text(
        '{"prompt": "Return a list of", "max_tokens": 9, "logprobs": 2}\n'
        '{"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "id": "ids", "temperature": 1.0, "seed": 8}\n',
        "utf-8",
    )
    words = ["generate", tiny, "--prompt", PROMPT, "--prompts", str(file), "--ranks", "2", *SMALL, "--json"]
    with start(*words, "--temperature", "0", "--max-tokens", "4", "--ignore-eos") as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_json_has_one_line_a_request_in_input_order_and_nothing_else(records):
    assert [record["id"] for record in records] == ["0", "1", "ids"]
    assert [len(record["token_ids"]) for record in records] == [4, 9, 2]
    assert [record["finish_reason"] for record in records] == ["length"] * 3
    assert records[2]["prompt_tokens"] == 3
    assert all(isinstance(record["text"], str) and record["text"] for record in records)


def test_json_reports_the_seed_that_was_given_or_drawn(records):
    assert records[2]["seed"] == 8
    assert isinstance(records[0]["seed"], int)
    assert records[0]["seed"] != records[1]["seed"]


def test_json_has_logprobs_where_they_were_asked_for(records):
    assert ["logprobs" in record for record in records] == [False, True, False]
    first = records[1]["logprobs"][0]
    assert first["token_id"] == records[1]["token_ids"][0]
    assert first["logprob"] == max(entry["logprob"] for entry in first["top"])
    assert len(first["top"]) == 2


def test_ctrl_c_ends_with_one_line_and_130(tiny):
    words = ["generate", tiny, "--prompt", PROMPT, "--ranks", "2", *SMALL, "--ignore-eos", "--max-tokens", "1900"]
    with start(*words) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "=== 0 (rank 0)\n"
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "serried: interrupted"
    assert "Traceback" not in err
    assert time.monotonic() - sent < 20


def test_a_reader_that_leaves_causes_no_traceback(tiny):
    with start("generate", tiny, "--prompt", PROMPT, *SMALL, "--ignore-eos", "--max-tokens", "300") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1, err
    assert "Traceback" not in err


def test_weights_that_are_not_numbers_are_said_to_be_the_cause(capsys, tiny, tmp_path):
    for file in Path(tiny).glob("*.json"):
        shutil.copy(file, tmp_path)
    weights = load_file(Path(tiny) / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "model.safetensors")
    assert main(["generate", str(tmp_path), "--prompt", "a", "--prompt", "b", *SMALL]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("[0 tokens, error]\n\n")
    assert said.err.splitlines()[-1] == (
        "serried: 2 of 2 requests ended in an error: no usable logits, they were NaN or infinite; "
        "the weights or the number format (--dtype) do not fit"
    )
