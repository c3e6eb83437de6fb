"""A client of tests in a process of its own: says every message of an answer as a line of JSON, and its status last.

grpc_reader.py ADDRESS REQUEST OPTION=NUMBER...    the request as hexadecimal bytes; options are of gRPC's channel
"""

from __future__ import annotations

import json
import sys

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc


def main(address: str, request: str, *options: str) -> None:
    pairs = [(name, int(value)) for name, _, value in (option.partition("=") for option in options)]
    with grpc.insecure_channel(address, options=pairs) as channel:
        try:
            for message in pb_grpc.VllmEngineStub(channel).Generate(
                pb.GenerateRequest.FromString(bytes.fromhex(request))
            ):
                chunk = message.chunk
                if message.HasField("chunk"):
                    say(offset=chunk.completion_tokens - len(chunk.token_ids), tokens=list(chunk.token_ids))
                else:
                    say(whole=list(message.complete.output_ids))
            say(status="OK", words="")
        except grpc.RpcError as error:
            say(status=error.code().name, words=error.details())


def say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
