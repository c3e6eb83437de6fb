"""Settings that make no sense together each give their warning, and those that do give none."""

from __future__ import annotations

import json

import pytest

from launch.cli import main
from launch.plan import plan_warnings

V3 = "deepseek-v3 --context 2048"
EPLB = "--enable-eplb"
WIDE = f"{V3} --ranks 32 --node-size 8 {EPLB}"

SENSELESS = {
    "_overlap_alone": (
        "deepseek-v2-lite --dbo on",
        "--dbo on with one rank: there is no exchange to hide",
    ),
    "_overlap_slower": (
        f"{V3} --ranks 8 --max-num-seqs 64 --dbo on",
        "--dbo on: 64 requests a rank take 66.7 ms in 2 parts and 38.6 ms whole, for every weight is read once a part",
    ),
    "_overlap_never": (
        f"{WIDE} --dbo auto --max-num-seqs 64 --dbo-decode-token-threshold 128",
        "--dbo-decode-token-threshold 128 is above --max-num-seqs 64: no step that decodes is ever cut",
    ),
    "_comm_sms_unused": (
        f"{WIDE} --comm-sms 40",
        "--comm-sms 40 has no effect: steps are not cut (--dbo off)",
    ),
    "_by_node_on_one": (
        f"{V3} --ranks 8 --max-num-seqs 64 --hierarchical on",
        "--hierarchical on with 8 ranks on one node: rows make a second trip and no network is spared",
    ),
    "_straight_over_nodes": (
        f"{WIDE} --hierarchical off",
        "--hierarchical off over 4 nodes: a step takes 111.0 ms, and 79.4 ms when a token travels once to each node",
    ),
    "_nodes_not_filled": (
        f"{V3} --ranks 20 --node-size 8 {EPLB}",
        "20 ranks do not fill nodes of 8: rows cannot go by node, and the last node's ranks send more than others; use "
        "16 or 24 ranks",
    ),
    "eplb_alone": (
        f"deepseek-v2-lite {EPLB}",
        "--enable-eplb with one rank: it holds all experts, and nothing can move",
    ),
    "eplb_missing": (
        f"{V3} --ranks 32",
        "32 ranks without --enable-eplb: with loads as recordings show them, the fullest rank gets about 2.3 times",
    ),
    "copies_uneven": (
        f"{WIDE} --num-redundant-experts 40",
        "256 experts + --num-redundant-experts 40 do not divide by 32 ranks: slots stay empty whose memory is taken "
        "all the same; 64 fills them",
    ),
    "copies_useless": (
        f"{V3} --ranks 8 --max-num-seqs 32 {EPLB} --num-redundant-experts 32",
        "--num-redundant-experts 32 on 8 ranks: a step takes 38.6 ms with them and 36.0 ms without, and they take 9.52",
    ),
    "copies_of_all": (
        f"{WIDE} --num-redundant-experts 256",
        "--num-redundant-experts 256 is a second copy of all 256 experts; an eighth would do",
    ),
    "eplb_too_slow": (
        f"{WIDE} --eplb-bytes-per-step 100000",
        "--eplb-bytes-per-step 100000: one expert of each layer takes a rank 25,550 steps to move, longer than "
        "--eplb-interval 3000",
    ),
    "window_too_long": (
        f"{WIDE} --eplb-window 5000",
        "--eplb-window 5000 is longer than --eplb-interval 3000: a decision looks at loads from before the last one",
    ),
    "_beat_alone": (
        "deepseek-v2-lite --prefill-schedule-interval 4",
        "--prefill-schedule-interval 4 with one rank: there is nobody to wait for, and prompts come later",
    ),
    "_beat_too_late": (
        f"{WIDE} --prefill-schedule-interval 64 --ttft-ms 800",
        "--prefill-schedule-interval 64: a prompt waits up to 5,004 ms for its step, longer than --ttft-ms 800",
    ),
    "_target_below_step": (
        f"{WIDE} --max-num-seqs 64 --hardware {{h200}} --itl-target-ms 20",
        "--itl-target-ms 20: a step of 64 requests without any prompt takes 30.9 ms, so prompts always get the least",
    ),
    "_cache_too_small": (
        f"{V3} --ranks 8",
        "--max-num-seqs 256: the cache holds 170 requests of 2,048 tokens; the others are preempted and computed again",
    ),
    "_rounds": (
        f"{WIDE} --round-tokens 128",
        "--max-num-seqs 256 is above --round-tokens 128: every exchange of a full step goes in rounds",
    ),
    "_step_too_small": (
        f"{WIDE} --max-num-batched-tokens 128",
        "--max-num-batched-tokens 128 is below --max-num-seqs 256: not all requests that run get a token in a step",
    ),
    "_step_too_long": (
        f"{WIDE} --tpot-ms 50 --max-num-batched-tokens 32768",
        "--max-num-batched-tokens 32768: a step full of prompts takes 4,810 ms, 96 times --tpot-ms 50",
    ),
    "_longest_unused": (
        f"{WIDE} --max-model-len 65536",
        "--max-model-len 65536: 32 times the context planned for; tables for it take",
    ),
    "_page_too_large": (
        f"deepseek-v3 --ranks 32 --node-size 8 {EPLB} --context 300 --block-size 256",
        "--block-size 256: a request of 300 tokens leaves most of its last page empty",
    ),
    "_fp8_rows": (
        "deepseek-v2-lite --ranks 8 --max-num-seqs 64 --dispatch-dtype fp8",
        "--dispatch-dtype fp8: this model's experts are not in fp8, so rows are rounded that they would take exactly",
    ),
    "_wide_rows": (
        f"{WIDE} --combine-dtype float32",
        "--combine-dtype float32: rows on their way back are twice as long; sums are in float32 either way",
    ),
    "_rows_by_slot": (
        f"{WIDE} --combine slots",
        "--combine slots over 4 nodes: a row returns for each expert, not for each rank, over the network",
    ),
    "_host_exposed": (f"{WIDE} --async-depth 0", "--async-depth 0 on a GPU: it idles while the host reads tokens"),
    "_counted_on_gpu": (f"{WIDE} --exchange exact", "--exchange exact on a GPU: the host reads counts in every layer"),
    "_torch_on_gpu": (f"{WIDE} --ops reference", "--ops reference on a GPU: torch's operations, which wait for"),
    "_wide_run": (
        "deepseek-v2-lite --dtype float32 --context 2048",
        "--dtype float32 on a GPU: 4 bytes a number, for weights, cache and rows alike",
    ),
    "_memory_share": (
        f"{WIDE} --gpu-memory-utilization 0.99",
        "--gpu-memory-utilization 0.99: nothing is left for the driver, libraries and gaps; 0.92 is usual",
    ),
    "_goal_below_floor": (
        f"{WIDE} --tpot-ms 5",
        "--tpot-ms 5: a step of one request a rank takes 18.8 ms; more ranks make it shorter",
    ),
}


def planned(line: str, capsys) -> tuple[int, list[str], list[str]]:
    """Exit code, the warnings of the record, and what was said beside it."""
    code = main(["plan", *line.split(), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out)["warnings"], said.err.splitlines()


def test_every_judge_has_a_case_here_and_there_are_more_than_twenty():
    names = [judge.__name__ for judge in plan_warnings.JUDGES]
    assert sorted(names) == sorted(SENSELESS)
    assert len(names) > 20


@pytest.mark.parametrize("name", SENSELESS)
def test_settings_that_make_no_sense_are_said_with_their_numbers(name: str, capsys):
    line, words = SENSELESS[name]
    h200 = str(plan_warnings.__file__).replace("launch/plan/plan_warnings.py", "profiles/hardware/h200.toml")
    code, warnings, said = planned(line.format(h200=h200), capsys)
    assert code == 0
    [found] = [warning for warning in warnings if warning.startswith(words)]
    assert f"warning: {found}" in said


def test_warnings_come_from_one_judge_each(monkeypatch, capsys):
    """Without its judge, a case says nothing of what it is a case of."""
    for name, (line, words) in SENSELESS.items():
        judges = tuple([judge for judge in plan_warnings.JUDGES if judge.__name__ != name])
        with monkeypatch.context() as patch:
            patch.setattr(plan_warnings, "JUDGES", judges)
            if "{h200}" not in line:
                assert not [warning for warning in planned(line, capsys)[1] if warning.startswith(words)]


@pytest.mark.parametrize(
    "line",
    [
        f"{WIDE} --num-redundant-experts 32 --dbo auto",
        "deepseek-v2-lite",
        "tiny-v3 --gpu cpu --context 512",
        f"{WIDE} --num-redundant-experts 32 --prefill-schedule-interval 4 --ttft-ms 800 --tpot-ms 70 --node-size 8",
    ],
)
def test_settings_that_make_sense_are_not_talked_about(line: str, capsys):
    assert planned(line, capsys)[1:] == ([], [])


def test_what_does_not_fit_is_said_alone(capsys):
    code, warnings, said = planned("kimi-k2 --dbo on", capsys)
    assert (code, warnings, len(said)) == (1, [], 1)
