"""A client of its own process: asks for one streamed answer, and says in a line of JSON what came.

    stream_client.py HOST:PORT PROMPT MAX_TOKENS LOGPROBS     PROMPT is token ids with commas between; LOGPROBS -1: none

Says "first" when the first message is there, so that whoever started it knows that it reads.
"""

import json
import sys

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc


def main() -> None:
    address, prompt, max_tokens, logprobs = sys.argv[1:]
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=int(max_tokens), ignore_eos=True)
    if int(logprobs) >= 0:
        sampling.logprobs = int(logprobs)
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=map(int, prompt.split(","))), sampling_params=sampling, stream=True
    )
    tokens: list[int] = []
    whole: list[int] | None = None
    status = "OK"
    with grpc.insecure_channel(address) as channel:
        try:
            for message in pb_grpc.VllmEngineStub(channel).Generate(request):
                if message.HasField("complete"):
                    whole = list(message.complete.output_ids)
                    continue
                if not tokens:
                    sys.stdout.write("first\n")
                    sys.stdout.flush()
                assert message.chunk.completion_tokens == len(tokens) + len(message.chunk.token_ids)
                tokens += message.chunk.token_ids
        except grpc.RpcError as error:
            status = f"{error.code().name}: {error.details()}"  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(json.dumps({"tokens": tokens, "whole": whole, "status": status}))


main()
