"""`serried simulate launch` and `serried simulate route`: what they print is what is played."""

from __future__ import annotations

import json

import pytest

from launch.cli import main


def simulated(line: str, capsys) -> list[str]:
    assert main(["simulate", *line.split()]) == 0
    return capsys.readouterr().out.splitlines()


def test_graphs_gain_more_the_shorter_kernels_are(capsys):
    lines = simulated("launch --json", capsys)
    assert lines[0].startswith("61 layers x 18 kernels = 1,098 launches a step, 6 us each: the host alone needs 6.6 ms")
    rows = json.loads(lines[-1])
    gains = [row["gain"] for row in rows]
    assert gains == sorted(gains)
    assert gains[0] < 0.03 < 2 < gains[-1]
    assert min(row["eager_us"] for row in rows) > 1098 * 6
    assert "a step never takes less than 6.6 ms without a graph" in lines[-2]


def test_the_picture_has_the_host_ahead_of_the_device_and_one_launch_of_a_graph(capsys):
    lines = simulated("launch --layers 2 --kernels 10 --step-ms 0.2", capsys)
    rows = [line.split()[-1] for line in lines if "host " in line or "device " in line.partition("  ")[2]][-4:]
    eager_host, eager_device, graph_host, graph_device = rows
    assert eager_host.count("l") + eager_host.count("L") > graph_host.count("l") > 0
    assert "L" not in graph_host
    assert "." in eager_device.lstrip(".")
    assert graph_device.rstrip(".").count(".") < eager_device.rstrip(".").count(".")


def test_a_host_that_keeps_up_is_said(capsys):
    assert simulated("launch --launch-us 0.01 --gap-us 0 --latency-us 0", capsys)[-1].startswith("The host keeps up")


def test_weights_change_where_requests_go_and_the_reason_says_why(capsys):
    usual = simulated("route --requests 1", capsys)
    assert next(line for line in usual if "<- chosen" in line).startswith("  rank 0: cost 4300 = queue 0 + prompt 4096")
    because = [line for line in usual if "because" in line]
    assert because == [
        "  because of rank 2 and it, less waits there (600) and its cache has more room (3,768), which outweighs its "
        "prefix (4,032)"
    ]
    for weights, rank in (("--routing-prefix-weight 2", 2), ("--routing-queue-weight 0 --routing-prefix-weight 4", 2),
                          ("--routing-cache-weight-tokens 0", 2), ("--routing-queue-weight 9", 0)):  # fmt: skip
        lines = simulated(f"route --requests 1 {weights} --json", capsys)
        assert json.loads(lines[-1])["ranks"] == [rank]
        assert lines[-2] == "the default weights  rank 0: 1"


def test_what_was_queued_counts_for_the_next_request(capsys):
    line = "route --requests 4 --queued 0 3000 --used 0 0 --matched 0 0 --routing-prefix-weight 0 --json"
    record = json.loads(simulated(line, capsys)[-1])
    assert record["ranks"] == [0, 1, 0, 0]
    assert [offers[0]["queue"] for offers in record["offers"]] == [0, 4096, 4096, 4096 + 64]


def test_a_draining_rank_is_not_asked(capsys):
    lines = simulated("route --requests 1 --draining 0", capsys)
    assert "  rank 0: not asked, it is draining" in lines
    assert main(["simulate", "route", "--draining", "0", "1", "2", "3"]) == 2
    assert "no rank can take the request: rank 0: not asked, it is draining" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("launch --layers 0", "layers is 0; it must be from 1 to 1000, e.g. 20"),
        ("launch --step-ms 0", "step_ms is 0.0; it must be above 0"),
        ("launch --queue 0", "queue is 0; it must be at least 1"),
        ("route --queued 1 2", "queued, used and matched have 2, 4 and 4 places"),
        ("route --matched 0 0 0 4096", "it must be below prompt_len 4096"),
        ("route --draining 7", "there are ranks 0 to 3"),
        ("route --routing-queue-weight -1", "routing_queue_weight is -1.0; it must be a number of at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(line: str, message: str, capsys):
    assert main(["simulate", *line.split()]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1


def test_simulate_itself_has_kept_its_name(capsys):
    assert simulated("--scenario burst --ranks 2 --json", capsys)[0].startswith("burst: ")
