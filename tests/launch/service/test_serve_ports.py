"""Ports are tried before anything is loaded."""

import socket
from collections.abc import Iterator

import pytest

from launch.commands import run_command
from launch.service.serve_config import ServeConfig
from launch.service.serve_ports import check_ports


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize("flag", ["port", "http_port", "openai_port", "openai_metrics_port"])
def test_a_port_that_somebody_has_is_refused_by_the_name_of_its_flag(flag: str, taken: int):
    free = {"port": 0, "http_port": 0, "openai_port": 0, "openai_metrics_port": 0}
    with pytest.raises(ValueError, match=rf"^{flag} is {taken}; another program listens there \(on 127\.0\.0\.1\)"):
        check_ports(ServeConfig(openai=True, **(free | {flag: taken})))


def test_the_ports_of_a_gateway_that_is_not_asked_for_do_not_matter(taken: int):
    check_ports(ServeConfig(port=0, http_port=0, openai_port=taken))


def test_the_port_after_the_first_is_looked_at_where_none_is_named(taken: int):
    with pytest.raises(ValueError, match=f"^http_port is {taken}"):
        check_ports(ServeConfig(port=taken - 1))


def test_two_flags_cannot_have_one_port():
    with pytest.raises(ValueError, match=r"^openai_port is 50051, and so is port"):
        check_ports(ServeConfig(port=50051, http_port=0, openai=True, openai_port=50051))


def test_a_port_can_be_had_right_after_it_was_tried(taken: int):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    check_ports(ServeConfig(port=free, http_port=0))
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", free))


def test_the_command_is_refused_before_anything_is_loaded(taken: int, capsys):
    assert run_command("serve", ["tiny-v3", "--port", str(taken), "--http-port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"serried: port is {taken}; another program listens there")
    assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["192.0.2.77", "no such host"])
def test_an_address_of_another_machine_is_no_address_of_this_one(host: str):
    with pytest.raises(ValueError, match=f"^host is '{host}'; it must be an address of this machine, e.g"):
        check_ports(ServeConfig(host=host, port=50051, http_port=0))
