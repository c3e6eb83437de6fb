"""What `serried serve` refuses before any rank starts."""

from __future__ import annotations

import socket

import pytest

from launch.serve import check_ports
from launch.serve_config import ServeConfig


def test_a_port_that_is_taken_is_refused_by_its_name_and_a_free_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        with pytest.raises(ValueError, match=rf"^port is {port}, which cannot be had on 127.0.0.1: .* or 0 for any"):
            check_ports(ServeConfig(port=port, http_port=0))
        with pytest.raises(ValueError, match=rf"^http_port is {port}, which"):
            check_ports(ServeConfig(port=0, http_port=port))
        with pytest.raises(ValueError, match=rf"^openai_port is {port}, which"):
            check_ports(ServeConfig(port=0, openai=True, openai_port=port))
        with pytest.raises(ValueError, match=rf"^http_port is {free}, which"):
            check_ports(ServeConfig(port=free, http_port=free))
        check_ports(ServeConfig(port=free, http_port=0))
