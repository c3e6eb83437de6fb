"""`serried plan --gpus`: a deployment that serves a goal, with sums that add up, or the reason why there is none."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launch.cli import main
from launch.command.config_profile import expand_profile
from launch.command.generate import GenerateFlags
from launch.command.models import PROFILES
from launch.command.parsing import parse_flags

SHOW = "deepseek-v3 --gpus 32 --context 2048 --tpot-ms 50"


@pytest.fixture
def planned(capsys):
    """planned(line) -> (exit code, the lines on standard output, what was said beside them)."""

    def run(line: str) -> tuple[int, list[str], str]:
        code = main(["plan", *shlex.split(line)])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err

    return run


def labelled(lines: list[str]) -> dict[str, str]:
    """Label -> what follows it, of the lines that have one."""
    pairs = [re.match(r"( *\S.*?)  +(.*)", line) for line in lines]
    return {pair[1].strip(): pair[2] for pair in pairs if pair}


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


def test_v3_on_32_h200_at_50_ms_is_feasible_and_its_sums_add_up(planned):
    code, lines, said = planned(SHOW)
    assert (code, said) == (0, "")
    sums = labelled(lines)
    layers, width, size, token_bytes = numbers(sums["a token's latents"])
    assert (layers * width * size, token_bytes) == (61 * 576 * 2, 70272)
    pages, page_size, per_token, gib = numbers(sums["a request's"])
    assert pages * page_size == 2048
    assert pages * page_size * per_token / 2**30 == pytest.approx(gib, abs=0.01)
    device, share, weights, workspaces, left, fit, batch = numbers(sums["left for them"])
    assert device * share - weights - workspaces == pytest.approx(left, abs=0.02)
    assert left * 2**30 / (2048 * 70272) - fit == pytest.approx(0.5, abs=0.6)  # whole requests
    parts = [numbers(sums[name])[0] for name in ("attention", "experts", "exchange", "head and host")]
    total, efficiency, decode = numbers(sums["together"])
    assert sum(parts) == pytest.approx(total, abs=0.03)
    assert total / efficiency == pytest.approx(decode, rel=0.01)
    step, beat, interval, tpot = numbers(sums["TPOT"])
    assert step + beat / interval == pytest.approx(tpot, abs=0.1)
    assert tpot <= 50
    used, _, a_gpu, together, _, _, a_user = numbers(sums["throughput"])
    assert used == batch
    assert 1e3 * batch / tpot == pytest.approx(a_gpu, rel=0.002)
    assert 32 * a_gpu == pytest.approx(together, rel=0.001)
    assert 1e3 / tpot == pytest.approx(a_user, rel=0.01)
    flying = numbers(sums["in flight"])
    assert flying[3] == 32 * batch
    assert flying[3] / (flying[4] * flying[5] / 1e3) == pytest.approx(flying[6], rel=0.01)


def test_ep8_with_256_requests_of_2k_is_refused_with_the_bytes(planned):
    code, _, said = planned("deepseek-v3 --gpus 8 --batch 256 --context 2048 --kv-cache-dtype bfloat16")
    assert code == 1
    need, left, fit = re.findall(r"= ([\d,]+) B \(|leave ([\d,]+) B|: (\d+) would fit", said)
    assert int(need[0].replace(",", "")) == 256 * 2048 * 70272
    assert int(left[1].replace(",", "")) // (2048 * 70272) == int(fit[2]) < 256
    assert said.startswith(
        "serried: 256 requests of 2,048 tokens do not fit on a rank of 8: their latents take 256 x 32 "
    )
    assert planned("deepseek-v3 --gpus 8 --batch 64 --context 2048")[0] == 0


def test_a_goal_below_any_step_is_refused_with_what_would_be_reached(planned):
    code, lines, said = planned("deepseek-v3 --gpus 16 --context 2048 --tpot-ms 5")
    assert code == 1
    assert re.match(
        r"serried: nothing that fits reaches TPOT 5 ms: the shortest TPOT is \d\d\.\d ms \(16 ranks, 1 ", said
    )
    assert not any(line.startswith("recommended") for line in lines)


def test_a_model_that_fits_nowhere_is_refused_with_its_weights(planned):
    code, _, said = planned("kimi-k2 --gpus 4 --node-size 4")
    assert code == 1
    assert re.match(r"serried: a rank of 4 needs \d+\.\d\d GiB: weights ", said)


def test_gpus_needed_follow_from_littles_law(planned):
    _, lines, _ = planned("deepseek-v3 --gpus 32 --context 2048 --output-len 500 --request-rate 50 --tpot-ms 60")
    rate, out, tpot, wanted, batch, group, gpus, = numbers(labelled(lines)["GPUs needed"])[:7]  # fmt: skip
    assert (rate, out) == (50, 500)
    assert wanted == pytest.approx(50 * 500 * tpot / 1e3, rel=0.01)
    assert gpus == -(-wanted // (batch * group)) * group


def test_tighter_goals_never_give_more_and_larger_groups_are_kept_to(planned):
    rates = []
    for goal in ("--tpot-ms 35", "--tpot-ms 45", "--tpot-ms 80", ""):
        code, lines, _ = planned(f"deepseek-v3 --gpus 32 --context 2048 {goal} --json")
        assert code == 0
        rates.append(json.loads(lines[-1])["chosen"]["tokens_per_s_per_gpu"])
    assert rates == sorted(rates)
    record = json.loads(planned("deepseek-v3 --gpus 32 --ranks 16 --context 2048 --json")[1][-1])
    assert {point["ranks"] for point in record["pareto"]} == {16}
    assert {point["batch"] for point in json.loads(planned(f"{SHOW} --batch 40 --json")[1][-1])["pareto"]} == {40}


def test_other_settings_stay_as_they_were_asked_for(planned):
    hardware = PROFILES / "hardware" / "h200.toml"
    line = f"deepseek-v3 --gpus 8 --context 2048 --block-size 128 --itl-target-ms 200 --hardware {hardware}"
    _, lines, _ = planned(line)
    assert sum("--block-size 128" in each and "--itl-target-ms 200" in each for each in lines) == 3
    assert "16 pages x 128 tokens" in labelled(lines)["a request's"]


def test_no_deployment_beats_one_of_the_front_in_both(planned):
    front = json.loads(planned(f"{SHOW} --json")[1][-1])["pareto"]
    users = [point["tokens_per_s_per_user"] for point in front]
    gpus = [point["tokens_per_s_per_gpu"] for point in front]
    assert users == sorted(users, reverse=True)
    assert gpus == sorted(gpus)
    assert len({(point["ranks"], point["tracks"]) for point in front}) > 2


def test_steps_over_latents_in_fp8_are_timed_as_such(planned):
    """With 64 heads the core reads latents for longer than it computes with them; with 128 it does not."""

    def decode_ms(model: str, cache: str, context: int) -> float:
        line = f"{model} --gpus 32 --ranks 32 --batch 64 --context {context} --kv-cache-dtype {cache} --json"
        [point] = [each for each in json.loads(planned(line)[1][-1])["pareto"] if each["tracks"] == 1][:1]
        return point["decode_ms"]

    saved = [
        decode_ms("kimi-k2", "bfloat16", context) - decode_ms("kimi-k2", "fp8", context) for context in (2048, 4096)
    ]
    assert 1.0 < saved[0] < saved[1] < 5.0
    assert decode_ms("deepseek-v3", "fp8", 2048) == decode_ms("deepseek-v3", "bfloat16", 2048)
    _, lines, _ = planned("deepseek-v3 --gpus 8 --batch 64 --context 2048 --kv-cache-dtype fp8")
    sums = labelled(lines)
    assert sums["times from"].startswith("tables of DeepSeek-V3 on NVIDIA H200 SXM, scaled by the ratio")
    layers, latent, scales, width, rope, wide, token_bytes = numbers(sums["a token's latents"])
    assert layers * (latent + scales * width + rope * wide) == token_bytes == 61 * 656


def test_prompts_elsewhere_cost_no_step_here(planned):
    here, elsewhere = (
        json.loads(planned(f"{SHOW} --batch 64 --ranks 32 --prefill {where} --json")[1][-1])["pareto"][0]
        for where in ("here", "elsewhere")
    )
    assert elsewhere["tpot_ms"] == elsewhere["decode_ms"] == here["decode_ms"] < here["tpot_ms"]


def test_a_late_first_token_shortens_the_interval(planned):
    found = [
        json.loads(planned(f"{SHOW} --batch 8 --ranks 32 {goal} --json")[1][-1])["chosen"]
        for goal in ("", "--ttft-ms 320")
    ]
    assert found[1]["ttft_ms"] <= 320 < found[0]["ttft_ms"]
    assert found[1]["prefill_schedule_interval"] < found[0]["prefill_schedule_interval"]


def test_the_commands_are_accepted_by_the_parser_and_say_the_plan(planned):
    _, lines, _ = planned(SHOW)
    commands = [shlex.split(line) for line in lines if " -m launch generate " in line]
    assert [words[0] for words in commands] == ["torchrun", "mpirun", "srun"]
    for words in commands:
        after = words[words.index("generate") + 1 :]
        flags = parse_flags(GenerateFlags, after, name="generate", about="")
        assert (flags.engine.ranks, flags.engine.node_size, flags.engine.device) == (32, 8, "cuda")
        assert flags.engine.eplb.num_redundant_experts == 32
        assert flags.group.meeting.rendezvous in (":29600", "$HEAD:29600")
    assert commands[0][1:5] == ["--nnodes", "4", "--node-rank", "$NODE"]
    one_node = [line for line in planned("deepseek-v2-lite --gpus 4 --node-size 8")[1] if "torchrun" in line]
    assert one_node[0].startswith("  torchrun --standalone --nproc-per-node ")


@pytest.mark.parametrize("path", sorted((PROFILES / "deploy").glob("*.toml")), ids=lambda path: path.stem)
def test_a_ready_deployment_is_what_its_command_still_gives(path: Path, tmp_path: Path, planned):
    text = path.read_text("utf-8")
    command = text.splitlines()[0].removeprefix("# Written by: serried plan ")
    assert planned(f"{command} --save {tmp_path / 'again.toml'}")[0] == 0
    again = tomllib.loads((tmp_path / "again.toml").read_text("utf-8"))
    found = tomllib.loads(text)
    assert again["settings"] == found["settings"]
    for name, value in found["deployment"].items():
        assert again["deployment"][name] == (pytest.approx(value, rel=0.02) if isinstance(value, float) else value)


def test_what_is_saved_is_what_profile_reads(planned, tmp_path: Path):
    file = tmp_path / "deploy.toml"
    code, lines, said = planned(f"{SHOW} --save {file}")
    assert (code, said) == (0, f"deployment written to {file}\n")
    assert sum(f"--profile {file}" in line for line in lines) == 3
    words, _ = expand_profile(["deepseek-v3", "--profile", str(file)], GenerateFlags)
    engine = parse_flags(GenerateFlags, words, name="generate", about="").engine
    chosen = json.loads(planned(f"{SHOW} --json")[1][-1])["chosen"]
    assert (engine.ranks, engine.scheduler.max_num_seqs) == (chosen["ranks"], chosen["batch"])
    assert engine.cadence.prefill_schedule_interval == chosen["prefill_schedule_interval"]
    assert Path(engine.hardware or "").name == "h200.toml"
    other = tmp_path / "notes.txt"
    other.write_text("keep me")
    assert planned(f"{SHOW} --save {other}")[0] == 2
    assert other.read_text() == "keep me"


class Links(HTMLParser):
    """Whatever a page would fetch, and its dots."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.dots = 0

    def handle_starttag(self, tag, attrs):
        self.dots += tag == "circle"
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href")]
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe") else []


def test_the_report_is_one_page_that_fetches_nothing_and_has_a_dot_for_each(planned, tmp_path: Path):
    file = tmp_path / "plan.html"
    assert planned(f"{SHOW} --report {file}")[0] == 0
    links = Links()
    links.feed(file.read_text("utf-8"))
    assert links.fetched == []
    assert links.dots > 100
    assert "recommended         groups of 32 ranks" in file.read_text("utf-8")


def test_a_png_needs_matplotlib_and_is_one(planned, tmp_path: Path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert planned(f"deepseek-v2-lite --gpus 2 --node-size 2 --report {file}")[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, _, said = planned(f"deepseek-v2-lite --gpus 1 --report {tmp_path / 'other.png'}")
    assert (code, "a PNG needs matplotlib: pip install serried[report], or .html" in said) == (2, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("deepseek-v3 --gpus 0", "gpus is 0; it must be at least 1, e.g. 8"),
        ("deepseek-v3 --save x.toml", "--save is for a recommended deployment, which needs --gpus, e.g. --gpus 32"),
        ("deepseek-v3 --gpus 8 --report x.pdf", "report is 'x.pdf'; it must end with .html or .png, e.g. plan.html"),
        ("deepseek-v3 --gpus 8 --efficiency 2", "efficiency is 2.0; it must be above 0 and at most 1, e.g. 0.8"),
        (
            "deepseek-v3 --gpus 8 --context 2048 --output-len 2048",
            "output_len is 2048; it must leave room for a prompt",
        ),
        ("deepseek-v3 --gpus 8 --context 999999", "context is 999999; the model allows at most 163840"),
        ("deepseek-v3 --gpus 8 --save /nowhere/x.toml", "No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(planned, line: str, message: str):
    code, lines, said = planned(line)
    assert (code, lines, said.count("\n")) == (2, [], 1)
    assert message in said


def test_the_chosen_line_is_marked_whatever_its_width(planned):
    _, lines, _ = planned("tiny-v3 --gpus 4")
    marked = [line for line in lines if line.rstrip().endswith("<-")]
    assert len(marked) == 1
    assert len(marked[0].split()) == 10
