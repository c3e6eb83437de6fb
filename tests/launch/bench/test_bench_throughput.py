"""`serried bench throughput`, `latency` and `sweep` on the bundled model: figures that fit together, kept and compared,
and a page that needs no network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.bench.bench_compare import comparison, differing, noise_of, read_result, verdict
from launch.bench.bench_result import HEADLINES, cost_shape, engine_settings
from launch.commands import REFUSED, run_command
from runtime import CacheConfig, EngineConfig, read_model_config
from runtime.graphs.graph_config import GraphConfig
from tests.launch.test_groups import TORCHRUN, finish, mpirun, start

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "profiles" / "models" / "tiny-v3")
SMALL = [MODEL, "--dtype", "float32", "--num-blocks", "64", "--input-len", "6", "--output-len", "10"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the figures (now.json), the page (page.html) and what was printed (out) of one run of two ranks."""
    folder = tmp_path_factory.mktemp("bench")
    words = [*SMALL, "--ranks", "2", "--transport", "threads", "--num-prompts", "12", "--max-concurrency", "6"]
    words += ["--output-json", str(folder / "now.json"), "--report", str(folder / "page.html")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        with (folder / "out").open("w") as out:
            patch.setattr("sys.stdout", out)
            assert run_command("bench", ["throughput", *words]) == 0
    return folder


@pytest.fixture(scope="module")
def found(files: Path) -> dict[str, Any]:
    return json.loads((files / "now.json").read_text())


def test_counts_are_those_of_the_load_and_rates_follow_from_them(found: dict[str, Any]):
    assert (found["completed"], found["failed"]) == (12, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (72, 120)
    assert found["output_throughput"] == pytest.approx(120 / found["duration"])
    assert found["output_throughput_per_gpu"] == pytest.approx(found["output_throughput"] / 2)
    assert found["total_token_throughput"] == pytest.approx(192 / found["duration"])
    assert found["max_concurrent_requests"] == 6
    assert found["median_e2el_ms"] >= found["median_ttft_ms"] > 0


def test_the_steady_part_lies_in_the_run_and_its_ranks_add_up(found: dict[str, Any]):
    steady = found["steady"]
    assert 0 < steady["begin_s"] < steady["end_s"] <= found["duration"]
    assert steady["decoding"] == 6
    assert steady["output_throughput"] == pytest.approx(2 * steady["output_throughput_per_gpu"])
    assert steady["rank_throughput_min"] <= steady["rank_throughput_median"] <= steady["rank_throughput_max"]
    assert steady["output_tokens"] <= found["total_output_tokens"]


def test_steps_are_cut_into_parts_that_add_up_to_them(found: dict[str, Any]):
    steps = found["steps"]
    assert steps["decode_steps"] <= steps["steps"] <= found["ranks"][0]["steps"]
    assert sum(steps["parts_ms"].values()) == pytest.approx(steps["step_ms"]["mean"], rel=0.2)
    assert steps["parts_ms"]["attention"] > 0 < steps["parts_ms"]["experts"]
    assert 0 < steps["overhead_cpu_share"] < 1
    assert 1 <= steps["batch_per_gpu"] <= 3
    assert 0.5 <= steps["balance_ratio"] <= 1.0
    assert 0 < found["experts"]["balancedness"] < 1 > found["experts"]["rank_level"] > 0
    pairs = sum(sum(layer) for layer in found["experts"]["counts"])
    warm_up = 6 * (6 + 8 - 1)
    computed = sum(rank["computed_tokens"] for rank in found["ranks"])
    assert pairs == 3 * 4 * (computed + warm_up), "three layers, top 4; the last token of a request is not computed"


def test_the_models_word_stands_beside_the_measured_step(found: dict[str, Any]):
    prediction = found["prediction"]
    error = prediction["predicted_step_ms"] / prediction["measured_step_ms"] - 1
    assert prediction["signed_error"] == pytest.approx(error)
    assert prediction["measured_step_ms"] == found["steps"]["step_ms"]["median"]
    assert 0 < prediction["mfu"] < 1 > prediction["mbu"] > 0


def test_all_that_a_reader_needs_is_printed(files: Path, found: dict[str, Any]):
    said = (files / "out").read_text()
    for words in (
        "machine   ", "commit    ", "settings  ", "6 at once", "seed 0", "output tokens/s per GPU",
        "min / median / max", "TTFT", "TPOT", "ITL", "E2EL", "P99", "waiting at the beat", "predicted", "error ",
        "MBU", "MFU", "balance", "exposed communication", f"hash {found['token_hash']}", "standard error",
        "router of the checkpoint", "2 ranks over threads",
    ):  # fmt: skip
        assert words in said, words
    assert '"duration"' not in said, "the file has the figures"


def test_the_same_load_gives_the_same_tokens_and_is_compared_with_noise(
    files: Path, found: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    words = [*SMALL, "--ranks", "2", "--transport", "threads", "--num-prompts", "12", "--max-concurrency", "4"]
    words += ["--compare", str(files / "now.json"), "--num-warmups", "1"]
    assert run_command("bench", ["throughput", *words]) == 0
    said = capsys.readouterr().out
    last = json.loads(said.splitlines()[-1])
    assert last["token_hash"] == found["token_hash"], "batch mates change no token in float32"
    assert "timeline" not in last
    assert "not alike: max_concurrency was 6, is 4" in said
    assert "tokens are the same" in said
    assert "noise from run to run is unknown" in said
    for name in HEADLINES:
        assert re.search(rf"{name}\s+[\d.]+\s+[\d.]+\s+[+-]\d", said), name


def test_a_difference_is_a_word_only_past_the_noise():
    assert verdict(3.0, 2.0, more_is_better=True) == "better"
    assert verdict(3.0, 2.0, more_is_better=False) == "worse"
    assert verdict(-3.0, 2.0, more_is_better=True) == "worse"
    assert verdict(-1.9, 2.0, more_is_better=True) == "within noise"
    assert verdict(9.0, None, more_is_better=True) == "noise unknown"


def test_noise_adds_up_from_both_runs(found: dict[str, Any]):
    old, new = (found | {"noise": {"source": "3 runs", "errors": {"mean_tpot_ms": each}}} for each in (3.0, 4.0))
    assert noise_of(old, new, "mean_tpot_ms") == pytest.approx(10.0)
    assert noise_of(old, new, "median_step_ms") is None
    slower = found | {"mean_tpot_ms": found["mean_tpot_ms"] + 11.0, "noise": new["noise"]}
    rows = {row["name"]: row for row in comparison(old, slower)}
    assert rows["mean_tpot_ms"]["verdict"] == "worse"
    assert rows["median_step_ms"]["verdict"] == "noise unknown"
    assert differing(found, found) == []


class Page(HTMLParser):
    """What a page would fetch, its pictures, and whether its tags are closed as they were opened."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.charts: list[str] = []
        self.scripts = 0
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self.scripts += tag == "script" or any(name.startswith("on") for name in values)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        if tag == "svg":
            self.charts.append(values["aria-label"] or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def read_page(path: Path) -> tuple[Page, str]:
    text, page = path.read_text(), Page()
    page.feed(text)
    page.close()
    return page, text


def test_the_page_is_whole_in_itself_and_shows_every_plot(files: Path, found: dict[str, Any]):
    page, text = read_page(files / "page.html")
    assert page.open == []
    assert page.fetched == ["link href=data:,"]
    assert (page.scripts, page.policy) == (0, "default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert not re.search(r"https?://|url\(|@import", text)
    for title in (
        "Output tokens/s per GPU against tokens/s per user", "Latency of a token", "Latency of a request",
        "Average decode step of a rank, by part", "Timeline of steps, rank 0", "Timeline of steps, rank 1",
        "Load of experts over the mean of their layer (1 = level)",
    ):  # fmt: skip
        assert title in page.charts
    assert found["token_hash"] in text
    assert "max_concurrency" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt install chromium")
@pytest.mark.timeout(240)
def test_a_browser_without_a_network_opens_the_page_without_errors_and_draws(files: Path, tmp_path: Path):
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--proxy-server=127.0.0.1:1", "--enable-logging=stderr", "--window-size=900,4000",
            f"--screenshot={tmp_path / 'page.png'}", (files / "page.html").as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=80,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused" in line]
    assert complaints == []
    assert (tmp_path / "page.png").stat().st_size > 40_000, "an empty page is far smaller"


@pytest.mark.timeout(120)
def test_a_sweep_has_a_point_for_each_number_of_requests_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "sweep.html"
    words = [*SMALL, "--concurrency", "4", "1", "--waves", "1", "--decode-only", "--report", str(page)]
    assert run_command("bench", ["sweep", *words]) == 0
    said = capsys.readouterr()
    points = json.loads(said.out.splitlines()[-1])["points"]
    assert [point["settings"]["max_concurrency"] for point in points] == [1, 4]
    assert [point["steps"]["batch_per_gpu"] for point in points] == pytest.approx([1, 4], rel=0.3)
    assert all(point["settings"]["routing_source"].endswith("on random latents") for point in points)
    assert f"report: {page}" in said.err
    found, text = read_page(page)
    assert found.open == []
    assert "1 at once: " in text
    assert "4 at once: " in text


@pytest.mark.timeout(120)
def test_latency_of_a_batch_is_measured_again_and_again(capsys: pytest.CaptureFixture[str]):
    assert run_command("bench", ["latency", *SMALL, "--batch-size", "2", "--num-iters", "3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["latencies"]) == 3
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert found["percentiles_latency"]["50"] == pytest.approx(sorted(found["latencies"])[1])
    assert found["noise"]["source"] == "3 runs"
    assert found["duration"] == pytest.approx(found["percentiles_latency"]["50"]), "the median one is shown in full"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["throughput", MODEL, "--num-prompts", "0"], "num_prompts is 0; it must be at least 1"),
        (["throughput", MODEL, "--repeats", "0"], "repeats is 0; it must be at least 1"),
        (["throughput", MODEL, "--num-warmups", "-1"], "num_warmups is -1; it must be at least 0"),
        (
            ["throughput", MODEL, "--input-len", "9000"],
            "the longest request has 9064 tokens, prompt and output; at most 2048 are allowed",
        ),
        (["throughput", MODEL, "--trace-file", "/no/such"], "/no/such: No such file or directory"),
        (["throughput", MODEL, "--compare", "/no/such"], "/no/such: No such file or directory"),
        (
            ["throughput", MODEL, "--output-json", "/no/such/x"],
            "output_json is '/no/such/x'; it must be a file in a folder",
        ),
        (["throughput", MODEL, "--report", "/"], "report is '/'; it must be a file in a folder"),
        (["latency", MODEL, "--batch-size", "0"], "batch_size is 0; it must be at least 1"),
        (["sweep", MODEL, "--concurrency", "0"], "concurrency is (0,); it must be numbers of at least 1"),
        (["sweep", MODEL, "--compare", "x"], "compare is of `bench throughput`"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert run_command("bench", words) == REFUSED
    assert message in capsys.readouterr().err


FOREIGN = {"settings": {}, "noise": {"source": "3 runs", "errors": {}}, "steps": {"step_ms": None}, "environment": {}}


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "7", '{"settings": {}}', "[" * 100_000, json.dumps(FOREIGN),
        json.dumps(FOREIGN | {"output_throughput_per_gpu": "fast", "median_ttft_ms": None, "mean_tpot_ms": None,
                              "steady": None}),
        json.dumps(FOREIGN | {"output_throughput_per_gpu": 1.0, "median_ttft_ms": None, "mean_tpot_ms": None,
                              "steady": ["fast"]}),
        json.dumps(FOREIGN | {"output_throughput_per_gpu": 1.0, "median_ttft_ms": None, "mean_tpot_ms": None,
                              "steady": None, "settings": ["fast"]}),
    ],
)  # fmt: skip
def test_only_a_result_can_be_compared_with(tmp_path: Path, text: str):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"compare is .*(no JSON|must be a file of)"):
        read_result(path)


def test_every_setting_of_an_engine_is_kept_and_read_back_alike(found: dict[str, Any]):
    config = EngineConfig(model=MODEL, graphs=GraphConfig(cuda_graph_sizes=(4, 8)), cache=CacheConfig(num_blocks=7))
    kept = engine_settings(config)
    names: set[str] = {"ranks", "seed"}
    for each in fields(config):
        value = getattr(config, each.name)
        names |= {part.name for part in fields(value)} if is_dataclass(value) else {each.name}
    assert set(kept) == names - {"model", "hardware"}
    assert set(kept) <= set(found["settings"])
    other = engine_settings(replace(config, cache=CacheConfig(num_blocks=7, kv_cache_dtype="fp8")))
    old, new = (found | {"settings": each} for each in (json.loads(json.dumps(kept)), other))
    assert differing(old, new) == ["kv_cache_dtype was auto, is fp8"]


def test_settings_that_an_older_result_does_not_have_are_named_once(found: dict[str, Any]):
    older = {name: value for name, value in found["settings"].items() if name not in ("seed", "enable_eplb")}
    assert differing(found | {"settings": older}, found) == ["only one of them says: enable_eplb, seed"]


def test_steps_are_predicted_with_latents_as_they_are_kept(found: dict[str, Any]):
    model = read_model_config(Path(MODEL))
    plain, fp8 = (
        cost_shape(SimpleNamespace(engine=SimpleNamespace(model=model), config=config)).cache_bytes  # type: ignore[arg-type]
        for config in (EngineConfig(model=MODEL), EngineConfig(model=MODEL, cache=CacheConfig(kv_cache_dtype="fp8")))
    )
    assert fp8 < plain


def test_warm_up_asks_for_no_more_than_a_trace_of_short_requests_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 2, "output_length": 2}\n' * 3)
    words = ["throughput", *SMALL, "--trace-file", str(trace)]
    assert run_command("bench", words) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["total_input_tokens"], last["total_output_tokens"], last["completed"]) == (6, 6, 3)


@pytest.mark.parametrize("warm", ["0", "1"])
def test_requests_that_the_cache_can_never_hold_were_asked_for_wrongly(warm: str, capsys: pytest.CaptureFixture[str]):
    words = ["throughput", *SMALL, "--num-blocks", "2", "--output-len", "200", "--num-warmups", warm]
    assert run_command("bench", words) == REFUSED
    assert "max_tokens=122 would fit" in capsys.readouterr().err


def launchers() -> list[Any]:
    """Two ranks as processes: by our own launcher in every run of the tests, by others in long ones."""
    bench = ["-m", "launch", "bench", "throughput"]
    return [
        pytest.param([sys.executable, *bench], ["--ranks", "2", "--transport", "gloo"], "gloo", marks=pytest.mark.slow),
        pytest.param([*mpirun(2), sys.executable, *bench], [], "mpi", marks=pytest.mark.soak),
        pytest.param([TORCHRUN, "--standalone", "--nproc-per-node", "2", *bench], [], "gloo", marks=pytest.mark.soak),
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("command", "words", "transport"), launchers())
def test_ranks_as_processes_are_measured_and_give_the_same_tokens(
    found: dict[str, Any], tmp_path: Path, command: list[str], words: list[str], transport: str
):
    if command[0] == "None":
        pytest.skip("mpirun is not installed: pip install 'serried[mpi]'")
    out = tmp_path / "out.json"
    load = ["--num-prompts", "12", "--max-concurrency", "6", "--num-warmups", "1", "--output-json", str(out)]
    done = start([*command, *SMALL, *words, *load])
    _, said = finish(done)
    assert done.returncode == 0, said
    here = json.loads(out.read_text())
    assert here["token_hash"] == found["token_hash"]
    assert (here["settings"]["transport"], here["settings"]["ranks"]) == (transport, 2)
    assert [rank["rank"] for rank in here["ranks"]] == [0, 1]
    assert here["steps"]["decode_steps"] > 0
    assert all(here["steps"]["parts_ms"][part] > 0 for part in ("attention", "dispatch", "experts", "combine", "beat"))
    assert [len(step["parts_ms"]) for step in here["timeline"]] == [2] * len(here["timeline"])
