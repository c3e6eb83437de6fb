"""The processes of a server: what it answers through a real wire, what listens, and what is left when one is killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from runtime import Engine, EngineConfig, SamplingParams
from tests.launch.serving import ROOT, TINY, Served

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
ENDLESS = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served.start(tmp_path_factory.mktemp("served"), "--ranks", "2", "--block-size", "16")
    yield server
    server.end()


def tokens_of(chunks: list[dict], index: int = 0) -> list[int]:
    """Of one answer; its chunks have no gap, and its end comes last and once."""
    mine = [chunk for chunk in chunks if chunk["index"] == index]
    tokens: list[int] = []
    for chunk in mine:
        assert chunk["offset"] == len(tokens), mine
        tokens += chunk["token_ids"]
    assert [chunk["finish_reason"] is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
    return tokens


def test_tokens_are_those_of_an_engine_of_a_program(served: Served):
    prompts = [[5 + index, 6, 7] for index in range(8)]
    asked = GREEDY | {"logprobs": 2, "prompt_logprobs": 1}
    lines = [
        served.ask({"admit": {"id": f"r{index}", "prompt": prompt, "params": asked, "rank": index % 2}})
        for index, prompt in enumerate(prompts)
    ]
    found = [list(line) for line in lines]
    config = EngineConfig(model=str(ROOT / TINY), ranks=2)
    with Engine(config) as engine:
        truth = engine.generate(prompts, SamplingParams(**asked))
    assert [tokens_of(chunks) for chunks in found] == [output.token_ids for output in truth]
    assert all(len(chunk["logprobs"]) == len(chunk["token_ids"]) for chunks in found for chunk in chunks)
    told = [[entry and entry[:1] for entry in chunks[0]["prompt_logprobs"]] for chunks in found]
    assert told == [[None, [prompt[1]], [prompt[2]]] for prompt in prompts]


def test_answers_of_one_prompt_differ_by_their_index_and_come_back_by_seed(served: Served):
    ask = {"prompt": [9, 8], "params": {"seed": 3, "max_tokens": 12, "ignore_eos": True}, "n": 3}
    first = list(served.ask({"admit": ask | {"id": "n1"}}))
    again = list(served.ask({"admit": ask | {"id": "n2"}}))
    answers = [tokens_of(first, index) for index in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert answers == [tokens_of(again, index) for index in range(3)]


def test_an_abort_ends_the_stream_and_frees_every_page(served: Served):
    line = served.ask({"admit": {"id": "long", "prompt": [5, 6], "params": ENDLESS}})
    assert next(line)["token_ids"]
    assert served.one({"abort": "long"}) is True
    assert served.one({"abort": "long"}) is False
    assert list(line)[-1]["finish_reason"] == "abort"
    until = time.monotonic() + 30.0
    while any(load["used_pages"] or load["running"] for load in served.one({"loads": None})):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_bad_request_is_refused_in_words_and_harms_nobody(served: Served):
    assert "from 0 to 2047" in served.one({"admit": {"id": "bad", "prompt": [99999]}})["refused"]
    assert (
        "connector"
        in served.one({"admit": {"id": "bad", "prompt": [1], "kv_transfer_params": {"do_remote_decode": True}}})[
            "refused"
        ]
    )
    assert served.one({"health": None})["state"] == "ready"


def test_cache_events_tell_what_is_stored_and_a_flush_clears_it(served: Served):
    list(served.ask({"admit": {"id": "cached", "prompt": list(range(5, 45)), "params": {"max_tokens": 2}, "rank": 1}}))
    feed = served.ask({"cache": None})
    state = list(islice(feed, 2))
    assert [(events["rank"], events["cleared"]) for events in state] == [(0, True), (1, True)]
    blocks = {tuple(block["token_ids"]): block for block in state[1]["stored"]}
    while tuple(range(21, 37)) not in blocks:  # told at the end of the wave, if not before
        blocks |= {tuple(block["token_ids"]): block for block in next(feed)["stored"]}
    first, second = blocks[tuple(range(5, 21))], blocks[tuple(range(21, 37))]
    assert (first["parent_hash"], second["parent_hash"]) == (None, first["block_hash"])
    assert served.one({"flush": None}) is True
    cleared = list(islice(feed, 2))
    assert {events["rank"]: events["cleared"] for events in cleared} == {0: True, 1: True}
    again = served.ask({"admit": {"id": "again", "prompt": list(range(5, 45)), "params": {"max_tokens": 1}, "rank": 1}})
    assert [chunk["num_cached_tokens"] for chunk in again] == [0]


def test_a_trace_of_some_steps_is_written_by_every_rank(served: Served, tmp_path: Path):
    served.one({"profile": {"steps": 3, "path": str(tmp_path / "trace.json")}})
    list(served.ask({"admit": {"id": "traced", "prompt": [5], "params": GREEDY}}))
    assert "3 steps traced" in served.one({"stop_profile": None})
    for name in ("trace.json", "trace.rank1.json"):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert sum(event.get("cat") == "step" for event in events) == 3


def test_the_front_door_holds_no_torch_and_nothing_listens_beyond_this_machine(served: Served):
    assert served.one({"process": None})["torch"] is False
    family = served.family()
    assert set(family) == {"front", "0", "1"}
    listening = [
        connection
        for process in [family["front"], *family["front"].children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1"}
    [wire] = {c.laddr for c in family["front"].net_connections("unix") if c.laddr.endswith("/ranks")}
    assert Path(wire).parent.stat().st_mode & 0o777 == 0o700


def test_a_client_that_stops_reading_or_leaves_holds_nobody_back(served: Served):
    stopped = served.ask({"admit": {"id": "stopped", "prompt": [5], "params": ENDLESS}})
    gone = served.ask({"admit": {"id": "gone", "prompt": [6], "params": ENDLESS}})
    next(stopped)
    gone.close()
    others = [served.ask({"admit": {"id": f"o{n}", "prompt": [7, n], "params": GREEDY}}) for n in range(4)]
    assert [len(tokens_of(list(line))) for line in others] == [24] * 4
    assert served.one({"abort": "stopped"}) is True
    served.one({"abort": "gone"})


def test_a_killed_rank_ends_every_stream_with_its_name_within_five_seconds(served: Served):
    family = served.family()
    lines = [served.ask({"admit": {"id": f"k{n}", "prompt": [5, n], "params": ENDLESS}}) for n in range(6)]
    for line in lines:
        next(line)
    began = time.monotonic()
    family["1"].send_signal(signal.SIGKILL)
    ends = [list(line)[-1] for line in lines]
    assert time.monotonic() - began < 5.0
    assert {end["finish_reason"] for end in ends} == {"error"}
    assert all(end["error"].startswith("rank 1 failed") and "SIGKILL" in end["error"] for end in ends), ends[0]
    health = served.one({"health": None})
    assert (health["state"], "rank 1" in health["culprit"]) == ("failed", True)
    assert "group_failed" in served.one({"admit": {"id": "late", "prompt": [5]}})["refused"]
    assert served.wait() == 1
    assert not psutil.wait_procs(list(family.values()), timeout=30.0)[1]
    assert "unpickled" not in served.said


def test_a_killed_front_door_leaves_no_rank_behind(tmp_path: Path):
    server = Served.start(tmp_path, "--ranks", "2")
    try:
        family = server.family()
        lines = [server.ask({"admit": {"id": f"k{n}", "prompt": [5, n], "params": ENDLESS}}) for n in range(4)]
        for line in lines:
            next(line)
        family.pop("front").kill()
        assert not psutil.wait_procs(list(family.values()), timeout=30.0)[1], server.said
        assert "ends: the front door is gone" in server.said
        assert "failed" not in server.said  # in order, not by a verdict
    finally:
        server.end()


def test_a_killed_rank_0_is_named_too(tmp_path: Path):
    server = Served.start(tmp_path, "--ranks", "2")
    try:
        family = server.family()
        line = server.ask({"admit": {"id": "k", "prompt": [5], "params": ENDLESS}})
        next(line)
        began = time.monotonic()
        family["0"].kill()
        assert list(line)[-1]["error"].startswith("rank 0 failed")
        assert time.monotonic() - began < 5.0
        assert server.wait() == 1
        assert not psutil.wait_procs(list(family.values()), timeout=30.0)[1], server.said
    finally:
        server.end()


def test_a_term_signal_lets_what_runs_end_and_the_exit_code_is_0(tmp_path: Path):
    server = Served.start(tmp_path, "--ranks", "1")
    try:
        line = server.ask({"admit": {"id": "runs", "prompt": [5], "params": GREEDY | {"max_tokens": 200}}})
        next(line)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        assert "draining" in server.one({"admit": {"id": "new", "prompt": [5]}})["refused"]
        assert list(line)[-1]["finish_reason"] == "length"
        assert server.wait() == 0, server.said
    finally:
        server.end()


def test_a_model_that_is_not_there_is_refused_by_exit_code_2(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"did not start: 2(.|\n)*is not a folder"):
        Served.start(tmp_path, model="nonsense")
