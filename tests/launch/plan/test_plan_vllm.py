"""`serried plan --from-vllm`: command lines of vLLM, flag by flag."""

from __future__ import annotations

import json
import shlex

import pytest

from launch.cli import main
from launch.command.generate import GenerateFlags
from launch.command.parsing import parse_flags
from launch.command.vllm_flags import ALIASES, RULES, whole
from launch.plan.plan_vllm import translate
from launch.service.serve import ServeFlags

PUBLISHED = (
    "VLLM_ALL2ALL_BACKEND=x vllm serve deepseek-ai/DeepSeek-R1-0528 --tensor-parallel-size 1 --enable-expert-parallel "
    "--data-parallel-size 32 --data-parallel-size-local 8 --data-parallel-address 10.0.0.1 --data-parallel-rpc-port "
    "13345 "
    '--enable-eplb --eplb-config \'{"num_redundant_experts": 32, "window_size": 500, "log_balancedness": true}\' '
    "--enable-dbo --dbo-decode-token-threshold 64 --max-model-len 16k --max-num-seqs=128 --gpu-memory-utilization 0.9 "
    "--all2all-backend deepep_low_latency --async-scheduling --trust-remote-code --api-server-count 4 --port 8000"
)
VALUES = {
    "max-model-len": "4096", "dtype": "bfloat16", "load-format": "safetensors", "gpu-memory-utilization": "0.9",
    "scheduling-policy": "fcfs", "all2all-backend": "pplx", "kv-cache-dtype": "auto", "prefill-schedule-interval": "4",
    "eplb-config": '{"step_interval": 100}', "num-redundant-experts": "32",
}  # fmt: skip


def told(command: str, capsys, *words: str) -> tuple[int, dict]:
    code = main(["plan", "--from-vllm", command, *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_published_command_line_becomes_one_that_the_parser_here_reads(capsys):
    code, record = told(PUBLISHED, capsys, "--context", "2048")
    assert code == 0
    engine = parse_flags(GenerateFlags, ["m", *record["words"]], name="generate", about="").engine
    assert (engine.ranks, engine.node_size, engine.async_depth) == (32, 8, 1)
    assert (engine.eplb.enable_eplb, engine.eplb.num_redundant_experts, engine.eplb.eplb_window) == (True, 32, 500)
    assert (engine.overlap.dbo, engine.overlap.dbo_decode_token_threshold) == ("on", 64)
    assert (engine.scheduler.max_model_len, engine.scheduler.max_num_seqs) == (16000, 128)
    assert (engine.exchange.exchange, engine.cache.gpu_memory_utilization) == ("bounded", 0.9)
    assert record["no_counterpart"] == ["--trust-remote-code"]


def test_every_flag_has_a_line_with_what_it_is_here_or_why_not(capsys):
    assert main(["plan", "--from-vllm", PUBLISHED]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert sum("  ->  " in line for line in lines) == PUBLISHED.count(" --")
    assert any(line.endswith("->  --dbo on") for line in lines)
    assert any(
        "--trust-remote-code" in line and "(no counterpart)   # no code of a checkpoint" in line for line in lines
    )
    assert any(line.startswith("serried serve deepseek-ai/DeepSeek-R1-0528 --ranks 32 ") for line in lines)
    assert any(line.startswith("weights per rank ") for line in lines)


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_gives_settings_that_exist_or_words_why_not(name: str):
    rule = RULES[name]
    value = VALUES.get(name, "8") if rule.values else ""
    found = translate(f"vllm serve m -dp 8 --{name} {shlex.quote(value)}" if value else f"vllm serve m -dp 8 --{name}")
    line = next(each for each in found.lines if each.said.startswith(f"--{name}"))
    assert line.here or line.why
    assert not (line.here and line.kind in ("none", "elsewhere"))
    words = found.words if "num_redundant_experts" not in found.settings else [*found.words, "--enable-eplb"]
    parse_flags(GenerateFlags, ["m", *words], name="generate", about="")


def test_short_names_and_both_ways_of_giving_values_are_read():
    short = translate("vllm serve m -tp 2 -dp=4 -q fp8 -O3")
    assert short.ranks == 8
    assert [line.said for line in short.lines][:3] == [
        "--tensor-parallel-size 2", "--data-parallel-size 4", "--quantization fp8"]  # fmt: skip
    assert set(ALIASES.values()) <= set(RULES)
    dotted = translate("vllm serve --model m -dp 8 --enable_eplb --eplb-config.num_redundant_experts 8")
    assert (dotted.model, dotted.settings["num_redundant_experts"]) == ("m", 8)


def test_ranks_are_all_gpus_and_nodes_have_their_share():
    found = translate("vllm serve m --data-parallel-size 16 --tensor-parallel-size 2 --data-parallel-size-local 4")
    assert found.words == ["--ranks", "32", "--node-size", "8"]


def test_what_is_not_known_is_said_and_takes_its_value_along():
    found = translate("vllm serve m --frobnicate 7 --sparkle --max-num-seqs 8")
    assert [(line.said, line.kind) for line in found.lines[:2]] == [("--frobnicate 7", "none"), ("--sparkle", "none")]
    assert found.settings == {"max_num_seqs": 8}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"), ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("deepseek-ai/DeepSeek-V2", "deepseek-v2"), ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("models/tiny-v3/", "tiny-v3"), ("deepseek-ai/DeepSeek-V3.2-Exp", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None), ("Qwen/Qwen3", None),
    ],
)  # fmt: skip
def test_models_are_known_by_their_hub_names(name: str, known: str | None):
    assert translate(f"vllm serve {name}").known_model == known


def test_a_model_that_is_not_known_is_translated_and_not_planned(capsys):
    assert main(["plan", "--from-vllm", "vllm serve Qwen/Qwen3 -dp 8"]) == 0
    assert capsys.readouterr().out.endswith("Qwen/Qwen3 is not in profiles/models, so nothing is planned; see serried "
                                            "plan FOLDER\n")  # fmt: skip


def test_warnings_and_misfits_are_those_of_plan(capsys):
    code, record = told("vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-dbo", capsys, "--context", "2048")
    assert code == 0
    assert any(warning.startswith("--dbo on: ") for warning in record["warnings"])
    code, record = told("vllm serve deepseek-ai/DeepSeek-V3 -dp 2", capsys)
    assert (code, len(record["misfits"])) == (1, 1)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python -m vllm", "is no vLLM server; it must begin with vllm serve"),
        ("vllm serve", "names no model"),
        ("vllm serve m --max-num-seqs", "--max-num-seqs needs a value"),
        ("vllm serve m --max-num-seqs many", "--max-num-seqs: could not convert string to float: 'many'"),
        ("vllm serve m --max-num-seqs 0", "max_num_seqs is 0; it must be a whole number of at least 1"),
        ("vllm serve m --eplb-config [1]", "--eplb-config: '[1]' is no JSON object"),
        ("vllm serve 'm", "No closing quotation"),
        ("vllm serve m --scheduling-policy lifo", "invalid choice 'lifo' for argument '--scheduling-policy'"),
    ],
)
def test_what_is_no_command_line_is_refused_in_one_line(command: str, message: str, capsys):
    assert main(["plan", "--from-vllm", command]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_numbers_are_read_as_vllm_reads_them():
    assert [whole(text) for text in ("16k", "16K", "1.5k", "2M", "7")] == [16000, 16384, 1500, 2 << 20, 7]
    with pytest.raises(ValueError, match=r"'1.5' is no whole number"):
        whole("1.5")


def test_the_command_serves_what_the_same_clients_reach_on_gpus(capsys):
    words = shlex.split(
        told("vllm serve m -dp 8 --host 0.0.0.0 --port 8100 --served-model-name a b", capsys)[1]["command"]
    )
    assert words[:2] == ["serried", "serve"]
    flags = parse_flags(ServeFlags, words[2:], name="serve", about="")
    assert (flags.engine.ranks, flags.engine.device) == (8, "cuda")
    serve = flags.serve
    assert (serve.openai, serve.openai_port, serve.host, serve.served_model_name) == (True, 8100, "0.0.0.0", "a")
    assert "--openai-port 8000" in told("vllm serve m -dp 8", capsys)[1]["command"]


def test_a_hub_s_name_is_said_to_be_no_folder(capsys, tmp_path):
    assert main(["plan", "--from-vllm", "vllm serve Qwen/Qwen3 -dp 8"]) == 0
    assert "put the checkpoint's folder for Qwen/Qwen3" in capsys.readouterr().out
    assert main(["plan", "--from-vllm", f"vllm serve {tmp_path} -dp 8"]) == 0
    assert "put the checkpoint's folder" not in capsys.readouterr().out
