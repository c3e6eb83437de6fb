"""Who may call, and with what: certificates, a secret that calls carry, and bytes that are a message.

Health checks of gRPC's own service need no secret: whoever restarts servers has none. Knows files, metadata and bytes;
does not know what is asked.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from .serve_config import ServeConfig

OPEN_TO_ALL = "/grpc.health.v1.Health/"
MIN_TOKEN_LEN = 16


def read_token(path: Path) -> bytes:
    """The secret in a file, without white space around it. Raises ValueError for one that is too short."""
    token = path.read_bytes().strip()
    if len(token) < MIN_TOKEN_LEN:
        raise ValueError(
            f"token_file is {str(path)!r}, with {len(token)} bytes; it must hold at least {MIN_TOKEN_LEN}, e.g. of "
            "openssl rand -hex 32"
        )
    return token


def check_access(config: ServeConfig) -> None:
    """Look at the files before anything is started. Raises ValueError or OSError for what cannot be used."""
    if config.token_file is not None:
        read_token(config.token_file)
    if config.tls_cert is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca is not None:
            context.load_verify_locations(config.tls_client_ca)
    except ssl.SSLError as error:
        shown = ", ".join(str(path) for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path)
        raise ValueError(
            f"tls_cert, tls_key and tls_client_ca ({shown}) are not PEM files that fit: {error}"
        ) from error


def server_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """For TLS, with clients' certificates when there is somebody to have signed them; None for plain text."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    client_ca = config.tls_client_ca.read_bytes() if config.tls_client_ca else None
    return grpc.ssl_server_credentials(
        [(config.tls_key.read_bytes(), config.tls_cert.read_bytes())],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


Handler = Any  # grpc.RpcMethodHandler, which is generic for type checkers only; None for a method that is not there
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class MessageGuard(grpc.aio.ServerInterceptor):
    """Methods of `service` get None for bytes that are no message, and can say so. Left to itself, gRPC would write a
    traceback into the log for each: a client could fill it."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        return handler._replace(request_deserializer=_or_none(handler.request_deserializer))


def _or_none(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read_or_none(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return None

    return read_or_none


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets calls through that carry `authorization: Bearer SECRET`, compared in constant time."""

    def __init__(self, token: bytes) -> None:
        self._wanted = b"Bearer " + token
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """See grpc.aio.ServerInterceptor."""
        if handler_call_details.method.startswith(OPEN_TO_ALL) or self._knows(handler_call_details):
            return await continuation(handler_call_details)
        return self._refusal

    def _knows(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        shown = given[0] if len(given) == 1 else b""
        return hmac.compare_digest(shown.encode() if isinstance(shown, str) else shown, self._wanted)


async def _refuse(request: object, context: grpc.aio.ServicerContext) -> None:
    words = "calls must carry the metadata authorization: Bearer SECRET"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)
