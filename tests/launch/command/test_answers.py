import io
import json

import pytest

from launch.command.answers import Answer, JsonPrinter, TextPrinter
from launch.command.prompts import Prompt
from launch.command.text import TextCodec
from runtime import SamplingParams, TokenEvent, TokenLogprob


class Letters(TextCodec):
    """Token n is the nth letter: enough to see what is printed when."""

    def __init__(self):
        pass

    def decode(self, token_ids):
        return "".join(chr(ord("a") + token) for token in token_ids)


CODEC = Letters()


def answer(name: str, *, params: SamplingParams | None = None, codec: TextCodec | None = CODEC) -> Answer:
    prompt = Prompt(id=name, text=f"{name}: ", params=params or SamplingParams(), origin=name)
    return Answer(prompt=prompt, prompt_tokens=(1, 2), stream=codec.stream() if codec else None)


def event(name: str, *token_ids: int, reason=None, rank: int = 0, logprobs=None) -> TokenEvent:
    return TokenEvent(request_id=name, rank=rank, seed=3, token_ids=token_ids, logprobs=logprobs, finish_reason=reason)


def test_a_record_has_the_fields_that_are_promised_and_logprobs_only_when_asked():
    plain = answer("x")
    plain.take(event("x", 0, 1))
    plain.take(event("x", 2, reason="stop"))
    assert plain.record() == {
        "id": "x", "prompt_tokens": 2, "token_ids": [0, 1, 2], "text": "abc", "finish_reason": "stop", "seed": 3,
    }  # fmt: skip
    asked = answer("x", params=SamplingParams(logprobs=1))
    asked.take(event("x", 4, reason="length", logprobs=(TokenLogprob(token_id=4, logprob=-0.5, top={7: -0.25}),)))
    assert asked.record()["logprobs"] == [
        {"token_id": 4, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}]},
    ]


def test_without_a_tokenizer_the_text_is_null():
    silent = answer("x", codec=None)
    silent.take(event("x", 0, reason="length"))
    assert silent.record()["text"] is None


def test_json_lines_come_in_input_order_each_as_soon_as_it_can():
    answers = [answer("a"), answer("b"), answer("c")]
    out = io.StringIO()
    printer = JsonPrinter(answers, out)

    def lines():
        printer.advance()
        return [json.loads(line)["id"] for line in out.getvalue().splitlines()]

    answers[1].take(event("b", 1, reason="stop"))
    assert lines() == []
    answers[0].take(event("a", 1, reason="stop"))
    assert lines() == ["a", "b"]
    answers[2].take(event("c", 1, reason="abort"))
    assert lines() == ["a", "b", "c"]


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "né"), ("ascii", r"n\u00e9"), ("latin-1", r"n\u00e9")])
def test_json_lines_are_json_in_every_encoding(encoding, shown):
    one = answer("né")
    one.take(event("né", 0, reason="stop"))
    out = io.TextIOWrapper(raw := io.BytesIO(), encoding, errors="backslashreplace")
    JsonPrinter([one], out).advance()
    line = raw.getvalue().decode(encoding)
    assert f'"id": "{shown}"' in line
    assert json.loads(line)["id"] == "né"


def test_text_grows_in_place_and_later_answers_wait_their_turn():
    answers = [answer("a"), answer("b")]
    out = io.StringIO()
    printer = TextPrinter(answers, out, codec=CODEC)
    answers[1].take(event("b", 5, 6, reason="length", rank=1))
    printer.advance()
    assert out.getvalue() == ""
    answers[0].take(event("a", 0))
    printer.advance()
    assert out.getvalue() == "=== a (rank 0)\na: a"
    answers[0].take(event("a", 1, reason="stop"))
    printer.advance()
    assert out.getvalue() == "=== a (rank 0)\na: ab\n[2 tokens, stop]\n\n=== b (rank 1)\nb: fg\n[2 tokens, length]\n\n"


def test_token_ids_are_printed_when_there_is_no_tokenizer():
    silent = answer("x", codec=None)
    silent.prompt = Prompt(id="x", token_ids=(1, 2), params=SamplingParams(), origin="x")
    out = io.StringIO()
    printer = TextPrinter([silent], out, codec=None)
    silent.take(event("x", 8))
    printer.advance()
    silent.take(event("x", 9, 10, reason="length"))
    printer.advance()
    assert out.getvalue() == "=== x (rank 0)\n1 2 > 8 9 10\n[3 tokens, length]\n\n"
