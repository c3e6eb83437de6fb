import json

import pytest

from launch.cli import main
from launch.command.models import PROFILES


@pytest.fixture
def planned(capsys):
    """planned(*words) -> (exit code, the JSON record, what was said on standard error)."""

    def run(*words: str) -> tuple[int, dict, str]:
        code = main(["plan", *words, "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return run


PUBLISHED = {
    "deepseek-v2-lite": 15.706,
    "deepseek-v2": 235.741,
    "deepseek-v3": 671.026,
    "kimi-k2": 1026.408,
    "moonlight-16b-a3b": 15.960,
    "glm-4.7-flash": 29.943,
}


OURS = {"v3-303m"}
"""Made up for benchmarks: nobody published it."""


def test_every_bundled_model_has_a_published_count_to_be_held_against():
    assert {path.stem for path in (PROFILES / "models").glob("*.json")} == set(PUBLISHED) | OURS


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_bundled_model_are_within_a_thousandth_of_the_published_count(planned, name):
    code, record, _ = planned(name, "--ranks", "32")
    assert record["parameters"]["main"] / 1e9 == pytest.approx(PUBLISHED[name], rel=1e-3)
    assert (code, record["fits"]) == (0, True)


def test_weights_and_cache_follow_by_hand(planned):
    _, record, _ = planned("deepseek-v2-lite", "--ranks", "4", "--gpu", "h200", "--context", "1000")
    # 26 layers with 16 experts each on a rank, three matrices of 2048 x 1408, bfloat16.
    assert record["weight_bytes"]["experts"] == 26 * 16 * 3 * 2048 * 1408 * 2
    assert record["slots_per_rank"] == 16
    # 27 layers, 512 latent + 64 rope, bfloat16; 1000 tokens take 16 pages of 64.
    assert record["kv_bytes_per_token"] == 27 * 576 * 2
    assert record["cached_requests"] == record["num_pages"] // 16
    assert record["running_requests"] == 256


def test_the_engines_flags_count(planned):
    _, wide, _ = planned("tiny-v3", "--dtype", "float64", "--num-blocks", "10", "--block-size", "32")
    _, narrow, _ = planned("tiny-v3", "--num-blocks", "10", "--block-size", "32")
    assert (wide["num_pages"], wide["page_size"]) == (10, 32)
    assert wide["kv_bytes_per_token"] == 4 * narrow["kv_bytes_per_token"]


def test_the_context_of_a_short_model_is_its_longest(planned):
    code, record, _ = planned("tiny-v3")
    assert (code, record["context"]) == (0, 2048)


def test_what_does_not_fit_is_said_with_its_arithmetic_and_exit_code_1(planned):
    code, record, said = planned("kimi-k2", "--ranks", "1")
    assert (code, record["fits"], record["running_requests"]) == (1, False, 0)
    assert record["shortfall_bytes"] > 0
    assert said.startswith("serried: a rank of 1 needs 967.51 GiB: weights 961.46 GiB ")
    assert said.endswith("the device has 139.00 GiB x 0.92 = 127.88 GiB, so 839.63 GiB are missing\n")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--context", "3000"], "a context of 3,000 tokens is longer than the model's 2,048"),
        (
            ["--context", "300", "--max-model-len", "200"],
            "a context of 300 tokens is longer than --max-model-len 200",
        ),
        (
            ["--context", "300", "--num-blocks", "2"],
            "not one request of 300 tokens fits: the cache of a rank holds 128 tokens",
        ),
    ],
)
def test_a_context_that_does_not_fit_is_said(planned, flags, reason):
    code, record, said = planned("tiny-v3", *flags)
    assert (code, record["misfits"], said) == (1, [reason], f"serried: {reason}\n")


def test_the_text_has_mtp_on_its_own_line(capsys):
    assert main(["plan", "deepseek-v3", "--ranks", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "parameters            671.026 billion, 36.626 billion active a token"
    assert lines[2] == "  MTP, apart          13.463 billion in 1 layer for multi-token prediction, not run"
    assert lines[3] == "ranks                 32 x NVIDIA H200 SXM"
    assert any(line.startswith("weights per rank ") for line in lines)
    assert lines[-1].startswith("requests of 4,096     280 a rank by the cache, 256 by --max-num-seqs: 8,192 in all")


def test_a_folder_and_a_file_plan_like_the_name(planned):
    folder = PROFILES / "models" / "tiny-v3"
    assert planned("tiny-v3") == planned(str(folder)) == planned(str(folder / "config.json"))


def test_more_ranks_than_experts_are_refused_with_how_many_would_do(capsys):
    assert main(["plan", "kimi-k2", "--ranks", "385"]) == 2
    assert capsys.readouterr().err == (
        "serried: num_ranks 385 must be from 1 to 384: each rank holds at least one of the 384 routed experts, so 384 "
        "would do\n"
    )


def test_a_model_that_is_not_built_is_refused_by_field(capsys, tmp_path):
    config = json.loads((PROFILES / "models" / "tiny-v3" / "config.json").read_text("utf-8"))
    file = tmp_path / "other.json"
    file.write_text(json.dumps(config | {"scoring_func": "tanh", "index_topk": 2048}), "utf-8")
    assert main(["plan", str(file)]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"serried: {file}: index_topk is 2048; sparse attention with an indexer (DSA) is not built")
    file.write_text(json.dumps(config | {"scoring_func": "tanh"}), "utf-8")
    assert main(["plan", str(file)]) == 2
    assert "scoring_func is 'tanh'" in capsys.readouterr().err


def test_an_unknown_device_is_refused_with_the_one_that_was_meant(capsys):
    assert main(["plan", "deepseek-v3", "--gpu", "h20"]) == 2
    assert capsys.readouterr().err == "serried: 'h20' is not a device in profiles/hardware; did you mean h200?\n"
