import dataclasses
from pathlib import Path

import pytest

from launch.service.serve_config import LimitsConfig, ServeConfig


def config(**changes) -> ServeConfig:
    return ServeConfig(limits=LimitsConfig(), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"port": 70000}, "port is 70000; it must be from 0 to 65535"),
        ({"http_port": -1}, "http_port is -1"),
        ({"stall_after_s": 0.0}, "stall_after_s is 0.0; it must be above 0"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s is inf"),
        ({"log_format": "xml"}, "log_format is 'xml'; it must be text or json"),
        ({"tls_cert": Path("a.pem")}, "tls_cert is 'a.pem'; it needs tls_key"),
        ({"tls_key": Path("a.pem")}, "tls_key is 'a.pem'; it needs tls_cert"),
        ({"tls_client_ca": Path("a.pem")}, "tls_client_ca is 'a.pem'; it needs tls_cert and tls_key"),
        ({"openai": True, "token_file": Path("t")}, "token_file is set, and openai, too"),
        ({"openai": True, "tls_cert": Path("c"), "tls_key": Path("k")}, "tls_cert is set, and openai, too"),
    ],
)
def test_what_cannot_be_is_refused_with_field_value_and_rule(changes, words):
    with pytest.raises(ValueError, match=words.split(";")[0]) as refused:
        config(**changes)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LimitsConfig)])
def test_every_limit_has_a_floor(name):
    with pytest.raises(ValueError, match=f"{name} is -1; it must be"):
        LimitsConfig(**{name: -1})


def test_http_is_next_to_grpc_unless_told_otherwise():
    assert (config(port=7).http_port_or_next, config(port=7, http_port=9).http_port_or_next) == (8, 9)
    assert (config(port=0).http_port_or_next, config(port=65535).http_port_or_next) == (0, 0)


def test_loopback_is_not_open_and_the_rest_is():
    assert [config(host=host).is_open for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")] == [False] * 4
    assert [config(host=host).is_open for host in ("0.0.0.0", "::", "10.0.0.1", "node-1")] == [True] * 4
