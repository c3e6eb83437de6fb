"""--profile and `serried config`: what a file says, what flags say over it, and where each setting comes from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launch.cli import main
from launch.command.config_profile import expand_profile, setting_names, takes_profile
from launch.command.generate import GenerateFlags
from launch.command.models import PROFILES
from launch.commands import COMMANDS
from launch.groups.place import GroupFlags
from runtime import EngineConfig

READY = str(PROFILES / "deploy" / "v3-h200-32.toml")


@pytest.fixture
def profile(tmp_path: Path):
    """profile(text) -> the path of a file with these settings."""

    def write(text: str) -> str:
        path = tmp_path / "deploy.toml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


@pytest.fixture
def configured(capsys):
    """configured(*words) -> setting -> (value, source)."""

    def run(*words: str) -> dict[str, tuple]:
        assert main(["config", *words, "--json"]) == 0
        return {name: (each["value"], each["source"]) for name, each in json.loads(capsys.readouterr().out).items()}

    return run


def test_flags_win_over_a_profile_and_a_profile_over_defaults(configured, profile):
    file = profile("[settings]\nmax_num_seqs = 64\nenable_eplb = true\nblock_size = 32\nenable_prefix_caching = true\n")
    found = configured("tiny-v3", "--profile", file, "--max-num-seqs", "8", "--no-enable-prefix-caching")
    assert found["max_num_seqs"] == (8, "flag")
    assert found["enable_prefix_caching"] == (False, "flag")
    assert found["enable_eplb"] == (True, f"profile ({file})")
    assert found["block_size"] == (32, f"profile ({file})")
    assert found["max_num_batched_tokens"] == (8192, "default")


def test_what_is_left_open_is_said_with_who_decides(configured):
    found = configured("deepseek-v3", "--ranks", "32", "--node-size", "8", "--gpu", "h200")
    assert found["dtype"] == ("bfloat16", "model")
    assert found["max_model_len"] == (163840, "model")
    assert found["ops"] == ("triton", "hardware")
    assert found["exchange"] == ("bounded", "hardware")
    assert found["hierarchical"][0] == "on"
    assert found["hierarchical"][1].startswith("hardware (bounded, ")
    assert found["num_blocks"][1] == "hardware"
    assert found["num_blocks"][0] * 64 * 70272 == found["kv_cache_memory_bytes"][0]
    assert found["ranks"] == (32, "flag")
    on_cpu = configured("tiny-v3")
    assert (on_cpu["ops"], on_cpu["exchange"][0]) == (("numba", "hardware"), "exact")


def test_a_ready_profile_and_no_other_flag(configured):
    found = configured("deepseek-v3", "--profile", READY)
    assert found["ranks"] == (32, f"profile ({READY})")
    assert found["device"][0] == "cuda"
    assert found["hardware"][0].endswith("profiles/hardware/h200.toml")


def test_every_setting_of_the_engine_and_its_group_is_listed(configured, capsys):
    names = {*setting_names(EngineConfig), *setting_names(GroupFlags)}
    assert set(configured("tiny-v3")) == names
    assert len(names) > 50
    assert main(["config", "tiny-v3", "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("ranks ")] == [["ranks", "2", "flag"]]


def test_names_of_settings_are_those_of_nested_fields():
    config, expected = EngineConfig(model="x"), set()
    for item in dataclasses.fields(EngineConfig):
        value = getattr(config, item.name)
        is_room = dataclasses.is_dataclass(value)
        expected |= {inner.name for inner in dataclasses.fields(value)} if is_room else {item.name}
    assert set(setting_names(EngineConfig)) == expected


def test_commands_with_an_engine_take_a_profile_and_others_do_not():
    taking = {name for name, command in COMMANDS.items() if takes_profile(command.flags)}
    assert {"generate", "plan", "config"} <= taking
    assert not {"doctor", "simulate", "bench kernels"} & taking


def test_a_command_without_a_setting_leaves_it_out(profile, capsys):
    file = profile('[settings]\nranks = 4\ntransport = "threads"\n')
    assert main(["plan", "tiny-v3", "--profile", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4


def test_words_come_out_as_they_went_in_without_a_profile():
    words = ["m", "--prompt", "--profile is a flag", "--ranks=2", "--no-enable-prefix-caching"]
    found, origins = expand_profile(words, GenerateFlags)
    assert found == words
    assert {"ranks", "enable_prefix_caching", "prompt"} <= origins.flags
    assert origins.profile == {}


@pytest.mark.timeout(120)
def test_tokens_are_those_of_the_settings_as_flags(profile, capsys):
    file = profile('[settings]\nranks = 2\ntransport = "threads"\nmax_num_seqs = 2\ndtype = "float64"\n')
    said = []
    for words in (["--profile", file], ["--ranks", "2", "--transport", "threads", "--max-num-seqs", "2", "--dtype",
                                        "float64"]):  # fmt: skip
        base = ["generate", "tiny-v3", "--prompt", "A class", "--max-tokens", "6", "--temperature", "0", "--json"]
        assert main([*base, *words]) == 0
        said.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[settings]\nmax_num_seq = 8\n", "max_num_seq is no setting; did you mean max_num_seqs?"),
        ("[settings]\nmodel = 'x'\n", "model is no setting"),
        ("[settings]\nranks = [8]\n", "ranks is [8]; it must be a number, a word, true or false"),
        ("max_num_seqs = 8\n", "max_num_seqs is unknown; a profile has [settings], e.g. max_num_seqs = 64"),
        ("[deployment]\n", "settings is missing; a profile has [settings]"),
        ("[settings\n", "is not valid TOML"),
        ("[settings]\nhardware = 'h20'\n", "'h20' is not a device in profiles/hardware; did you mean h200?"),
        ("[settings]\nmax_num_seqs = 0\n", "max_num_seqs is 0; it must be a whole number of at least 1"),
        ("[settings]\nmax_num_seqs = 'many'\n", "--max-num-seqs: invalid literal for int() with base 10: 'many'"),
    ],
)
def test_a_broken_profile_is_refused_in_one_line(text: str, message: str, profile, capsys):
    assert main(["generate", "tiny-v3", "--profile", profile(text), "--prompt", "x"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile"], "--profile needs a file, e.g. profiles/deploy/v3-h200-32.toml"),
        (["--profile="], "--profile needs a file"),
        (["--profile", "nowhere.toml"], "nowhere.toml: No such file or directory"),
    ],
)
def test_a_profile_that_is_not_there_is_refused(words: list[str], message: str, capsys):
    assert main(["generate", "tiny-v3", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_says_that_there_is_a_profile(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "--profile FILE.toml" in capsys.readouterr().out
