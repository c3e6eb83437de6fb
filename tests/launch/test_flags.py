import dataclasses
import io
import re
import shlex
import sys

import pytest

from launch.command.generate import GenerateFlags
from launch.commands import COMMANDS, parse_flags
from launch.groups.refusal import Refusal
from runtime import EngineConfig, SamplingParams


def generate(line: str) -> GenerateFlags:
    command = COMMANDS["generate"]
    return parse_flags(command.flags, shlex.split(line), name="generate", about=command.about)


def test_without_flags_everything_has_the_default_of_its_config():
    flags = generate("folder")
    assert flags.engine == EngineConfig(model="folder")
    assert flags.sampling.params() == SamplingParams()
    assert (flags.prompt, flags.prompts, flags.json, flags.table) == ((), None, False, False)


def test_prompts_repeat_and_keep_their_order():
    assert generate("m --prompt b --prompt 'a a'").prompt == ("b", "a a")


def test_flags_of_nested_configs_have_no_prefix_and_vllm_spellings():
    engine = generate(
        "m --ranks 4 --dtype float32 --load-format dummy --seed 7 --block-size 16 --max-num-batched-tokens 64 "
        "--max-num-seqs 2 --max-model-len 128 --no-enable-prefix-caching --scheduling-policy priority"
    ).engine
    assert (engine.ranks, engine.dtype, engine.load_format, engine.seed) == (4, "float32", "dummy", 7)
    assert engine.cache.block_size == 16
    assert (engine.scheduler.max_num_batched_tokens, engine.scheduler.max_num_seqs) == (64, 2)
    assert engine.scheduler.max_model_len == 128
    assert engine.scheduler.enable_prefix_caching is False
    assert engine.scheduler.scheduling_policy == "priority"
    assert generate("m --enable-prefix-caching").engine.scheduler.enable_prefix_caching is True


def test_sampling_flags_make_sampling_params():
    flags = generate(
        "m --temperature 0 --top-k 5 --top-p 0.9 --min-p 0.1 --max-tokens 3 --min-tokens 1 --logprobs 2 "
        "--stop-token-ids 4 5 --logit-bias 7 -1.5 8 2 --ignore-eos --sampling-seed 11"
    )
    assert flags.sampling.params() == SamplingParams(
        temperature=0.0, top_k=5, top_p=0.9, min_p=0.1, max_tokens=3, min_tokens=1, logprobs=2,
        stop_token_ids=(4, 5), logit_bias={7: -1.5, 8: 2.0}, ignore_eos=True, seed=11,
    )  # fmt: skip


def test_max_tokens_may_be_left_open():
    assert generate("m --max-tokens None").sampling.params().max_tokens is None


def test_the_sampling_flags_are_the_fields_of_sampling_params_with_their_defaults():
    assert dataclasses.asdict(generate("m").sampling) == dataclasses.asdict(SamplingParams())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_shows_examples_and_explains_every_flag(name, capsys):
    command = COMMANDS[name]
    with pytest.raises(SystemExit) as exit_:
        parse_flags(command.flags, ["--help"], name=name, about=command.about)
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: serried {name}" in text
    assert f"\n  serried {name} " in text
    explained = re.sub(r"[│\s]+", " ", text)
    assert re.findall(r"--[a-z-]+(?: [A-Z]+| \{[^}]*\}\S*| \[[^(]*\])? \(default", explained) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("m --rank 2", "unrecognized options: --rank, 2 Perhaps you meant: --ranks INT"),
        (
            "m --tensor-parallel-size 4",
            "--tensor-parallel-size is a flag of vLLM that is said otherwise here: MLA keeps",
        ),
        ("m -dp=4", "-dp is a flag of vLLM that is said otherwise here: each GPU is a rank: --ranks"),
        ("", "missing from serried generate: MODEL"),
        ("m --temperature warm", "--temperature: could not convert string to float: 'warm'"),
        ("m --dtype half", "invalid choice 'half' for argument '--dtype'. Expected one of ('auto', "),
        ("m --prompts", "missing value for argument '--prompts'. Expected 1 values."),
        ("m --ranks 0", "ranks is 0; it must be a whole number of at least 1, e.g. 1"),
        ("m --block-size 0", "block_size is 0; it must be a whole number of at least 1, e.g. 64"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_bad_flag_is_refused_in_one_line(line, message, encoding, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))  # the parser draws boxes to match it
    with pytest.raises(Refusal) as refusal:
        generate(line)
    said = str(refusal.value)
    assert said.startswith(message)
    assert said.endswith(" (serried generate --help)")
    assert not re.search(r"\n|[─│]|--- ", said)


def test_top_p_out_of_range_is_refused_with_field_value_and_rule():
    with pytest.raises(Refusal, match=r"^top_p = 1\.5: must be a number above 0 and at most 1, for example 1\.0 "):
        generate("m --top-p 1.5")


def test_the_help_of_a_seed_says_what_equal_seeds_promise_and_where_that_ends(capsys):
    with pytest.raises(SystemExit):
        generate("--help")
    text = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    said = text[text.index("--sampling-seed") :][:400]
    assert "whatever else runs, in float32 and float64" in said
    assert "16-bit" in said
