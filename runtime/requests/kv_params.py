"""What a request says of its latents: who computed them, or that another engine is to fetch them.

On the wire an object of JSON, under the names that gateways hand from a prefill to a decode engine as they are:

    to prefill      do_remote_decode: true
    from prefill    do_remote_prefill: true, remote_engine_id, remote_request_id, remote_host, remote_port, ...

Knows names and types; a host that is not listed is refused here, so that no request makes an engine call a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ep.errors import RequestError

from .kv_config import KvConfig


class KvParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Both directions; other names that an object has are ignored.

    remote_block_ids   pages at the engine that computed them; for the reader of a log
    remote_protocol    the connector that they are fetched with
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_protocol: str | None = None
    remote_block_ids: tuple[int, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        """The object, with both marks in it."""
        marks = {"do_remote_decode": self.do_remote_decode, "do_remote_prefill": self.do_remote_prefill}
        return {**marks, **msgspec.to_builtins(self)}


def parse_params(given: Mapping[str, Any] | None, config: KvConfig) -> KvParams | None:
    """The object of a request, checked; None where it asks for nothing. Raises RequestError (field, value, rule)."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refused("", given, "must be an object")
    try:
        params = msgspec.convert(dict(given), KvParams)
    except msgspec.ValidationError as error:
        raise _refused("", "an object", f"is not as it must be: {error}") from None
    if params.do_remote_decode and params.do_remote_prefill:
        raise _refused("", "both marks", "must have do_remote_prefill or do_remote_decode, not both")
    if not (params.do_remote_decode or params.do_remote_prefill):
        return None
    if not config.peers:
        raise _refused(
            "", "an object", "must be left out: no connector here fetches or leaves latents (--kv-connector)"
        )
    needed, name = ("prefill", "do_remote_decode") if params.do_remote_decode else ("decode", "do_remote_prefill")
    if config.kv_role not in (needed, "both"):
        raise _refused(
            f".{name}", True, f"must go to an engine with --kv-role {needed} or both; this one is {config.kv_role}"
        )
    if params.do_remote_prefill:
        _check_source(params, config)
    return params


def _check_source(params: KvParams, config: KvConfig) -> None:
    for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port"):
        if getattr(params, name) is None:
            raise _refused(f".{name}", None, "must say where the latents are")
    if not config.allows(params.remote_host or ""):
        rule = "must be loopback, or one of --kv-allow-hosts (which needs --kv-key-file)"
        raise _refused(".remote_host", params.remote_host, rule)
    if not 0 < (params.remote_port or 0) < 65536:
        raise _refused(".remote_port", params.remote_port, "must be from 1 to 65535")
    if params.remote_protocol is not None and params.remote_protocol not in config.peers:
        raise _refused(".remote_protocol", params.remote_protocol, f"must be one of {', '.join(config.peers)} here")


def _refused(place: str, value: object, rule: str) -> RequestError:
    shown = ascii(value)
    return RequestError(field=f"kv_transfer_params{place}", value=value if len(shown) <= 60 else shown[:60], rule=rule)
