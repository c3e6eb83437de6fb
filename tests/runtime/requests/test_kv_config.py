"""What may be set of handing latents over, and whom a request may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep import RequestError
from runtime.requests.kv_config import KvConfig
from runtime.requests.kv_params import KvParams, parse_params
from runtime.scheduling.scheduler import SchedulerConfig
from runtime.settings.config import EngineConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_connector": "tpc"}, "kv_connector is 'tpc'; it must name nixl, tcp, file or host"),
        ({"kv_connector": "tcp,tcp"}, "must name each connector once"),
        ({"kv_role": "encode"}, "kv_role is 'encode'; it must be one of prefill, decode, both"),
        ({"kv_load_failure_policy": "x"}, "it must be one of fail, recompute"),
        ({"kv_lease_s": 0}, "kv_lease_s is 0; it must be above 0"),
        ({"kv_load_timeout_s": float("nan")}, "kv_load_timeout_s is nan"),
        ({"kv_connector": "file"}, "kv_path is empty"),
        ({"kv_connector": "tcp", "kv_host": "0.0.0.0"}, "without a key it must be loopback"),
        ({"kv_host_bytes": 0}, "kv_host_bytes is 0"),
    ],
)
def test_a_wrong_setting_is_told_with_its_rule(settings: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        KvConfig(**settings)


def test_stores_need_the_prefix_cache():
    with pytest.raises(ValueError, match="kv_connector is 'host' with prefix caching off"):
        EngineConfig(
            model="m", kv=KvConfig(kv_connector="host"), scheduler=SchedulerConfig(enable_prefix_caching=False)
        )


def test_a_key_is_read_from_a_file_that_nobody_else_can_read(tmp_path: Path):
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef\n")
    config = KvConfig(kv_key_file=str(file))
    file.chmod(0o644)
    with pytest.raises(ValueError, match="others can read it; chmod 600"):
        config.key()
    file.chmod(0o600)
    assert config.key() == b"0123456789abcdef"
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 16 bytes"):
        config.key()
    with pytest.raises(ValueError, match="no such file"):
        KvConfig(kv_key_file=str(tmp_path / "none")).key()


def test_hosts_that_are_not_listed_are_refused_and_listing_needs_a_key():
    assert KvConfig().allows("127.0.0.1")
    assert not KvConfig().allows("10.0.0.1")
    assert not KvConfig(kv_allow_hosts="10.0.0.1").allows("10.0.0.1")
    listed = KvConfig(kv_allow_hosts="10.0.0.1, 10.0.0.2", kv_key_file="k")
    assert listed.allows("10.0.0.2")
    assert not listed.allows("10.0.0.3")
    assert not listed.allows("")


def test_params_that_ask_for_nothing_are_none_and_others_are_ignored():
    config = KvConfig(kv_connector="tcp")
    assert parse_params(None, config) is None
    assert parse_params({"do_remote_decode": False, "do_remote_prefill": False}, config) is None
    params = parse_params({"do_remote_decode": True, "tp_size": 1, "remote_block_ids": None}, config)
    assert params == KvParams(do_remote_decode=True)
    with pytest.raises(RequestError, match="must be an object"):
        parse_params([1], config)


def test_what_prefill_answers_is_what_decode_reads():
    params = KvParams(
        do_remote_prefill=True,
        remote_engine_id="e",
        remote_request_id="r",
        remote_host="127.0.0.1",
        remote_port=5,
        remote_protocol="tcp",
        remote_block_ids=(1, 2),
    )
    assert parse_params(params.as_json(), KvConfig(kv_connector="tcp")) == params
    assert params.as_json()["do_remote_decode"] is False
