import json
import os
import re

import pytest

from launch.command.prompts import gather_prompts, parse_lines
from runtime import SamplingParams

BASE = SamplingParams(temperature=0.0, max_tokens=5)


def parsed(*lines: str):
    return parse_lines(lines, name="f.jsonl", params=BASE)


def test_a_line_takes_what_it_leaves_out_from_the_command_line():
    [prompt] = parsed('{"prompt": "Hi", "max_tokens": 9, "seed": 4}')
    assert prompt.text == "Hi"
    assert prompt.token_ids is None
    assert prompt.params == SamplingParams(temperature=0.0, max_tokens=9, seed=4)


def test_token_ids_ids_and_priority_are_read():
    [prompt] = parsed('{"prompt_token_ids": [3, 1], "id": "x", "priority": -2}')
    assert (prompt.token_ids, prompt.text, prompt.id, prompt.priority) == ((3, 1), None, "x", -2)
    assert prompt.params == BASE


def test_logit_bias_keys_are_strings_in_json():
    [prompt] = parsed('{"prompt": "a", "logit_bias": {"7": -100}}')
    assert prompt.params.logit_bias == {7: -100.0}


def test_empty_lines_are_skipped_and_ids_count_requests():
    prompts = parsed('{"prompt": "a"}\n', "\n", '{"prompt": "b"}\n')
    assert [(prompt.id, prompt.origin) for prompt in prompts] == [("0", "f.jsonl:1"), ("1", "f.jsonl:3")]


def test_texts_come_before_the_lines_of_the_file(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "c"}\n', "utf-8")
    prompts = gather_prompts(["a", "b"], file, BASE)
    assert [(prompt.id, prompt.text) for prompt in prompts] == [("0", "a"), ("1", "b"), ("2", "c")]
    assert prompts[1].origin == "--prompt 2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "f.jsonl:1: not JSON: Expecting ',' delimiter (column 15)"),
        ('["a"]', 'f.jsonl:1: a line must be a JSON object, e.g. {"prompt": "Hello"}'),
        ("{}", "f.jsonl:1: give either prompt or prompt_token_ids, and not both"),
        (
            '{"prompt": "a", "prompt_token_ids": [1]}',
            "f.jsonl:1: give either prompt or prompt_token_ids, and not both",
        ),
        ('{"prompt": 5}', 'f.jsonl:1: prompt is 5; it must be a string, e.g. "a"'),
        ('{"prompt": "a", "id": 5}', 'f.jsonl:1: id is 5; it must be a string, e.g. "a"'),
        ('{"prompt": "a", "priority": "high"}', 'f.jsonl:1: priority is "high"; it must be a whole number, e.g. 0'),
        ('{"prompt_token_ids": "1 2"}', "f.jsonl:1: prompt_token_ids must be a list of whole numbers, e.g. [1, 2]"),
        ('{"prompt_token_ids": [1, true]}', "f.jsonl:1: prompt_token_ids[1] is true; it must be a whole number"),
        ('{"prompt": [[1]]}', 'f.jsonl:1: prompt is a list; it must be a string, e.g. "a"'),
        ('{"prompt": "a", "id": {"b": 1}}', 'f.jsonl:1: id is an object; it must be a string, e.g. "a"'),
    ],
)
def test_a_bad_line_is_refused_with_place_and_field(line, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parsed(line)


@pytest.mark.parametrize("field", ["prompt", "id"])
def test_half_a_surrogate_pair_is_refused_with_place_and_field(field):
    line = json.dumps({"prompt": "ok"} | {field: "ab\ud800"})
    message = (
        f"f.jsonl:1: {field} has \\ud800 as character 3, half of a surrogate pair and no character; "
        "write both halves, e.g. \\ud83d\\ude00, or the character itself"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parsed(line)


def test_both_halves_of_a_surrogate_pair_are_one_character():
    assert [prompt.text for prompt in parsed(r'{"prompt": "\ud83d\ude00"}')] == ["\U0001f600"]


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"prompt": [', '{"stop_token_ids": ['])
def test_endless_nesting_is_refused_with_place(opening):
    with pytest.raises(ValueError, match=r"^f\.jsonl:2: brackets are nested too deeply; "):
        parsed('{"prompt": "a"}', opening + "[" * 200_000)


@pytest.mark.parametrize("depth", [10, 100, *range(900, 1000, 7)])
def test_any_nesting_of_a_value_is_refused_in_words(depth):
    for field in ("prompt", "id", "priority", "top_k", "stop_token_ids", "logit_bias", "prompt_token_ids"):
        with pytest.raises(ValueError, match=r"^f\.jsonl:1: "):
            parsed(json.dumps({"prompt": "a"})[:-1] + f', "{field}": {"[" * depth}{"]" * depth}}}')


def test_a_number_of_too_many_digits_is_refused_with_place():
    with pytest.raises(ValueError, match=r"^f\.jsonl:1: a number has more digits than any field takes$"):
        parsed('{"prompt": "a", "seed": ' + "9" * 5000 + "}")


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ('{"prompt": "a", "id": ' + "9" * 4000 + "}", "f.jsonl:1: id is 999"),
        ('{"prompt_token_ids": ["' + "9" * 4000 + '"]}', 'f.jsonl:1: prompt_token_ids[0] is "999'),
        ('{"prompt": "a", "seed": ' + "9" * 4000 + "}", "f.jsonl:1: seed = "),
        ('{"prompt": "a", "' + "9" * 4000 + '": 1, "' + "9" * 4000 + '": 2}', 'f.jsonl:1: "999'),
    ],
)
def test_what_is_long_is_shortened_in_the_message(line, start):
    with pytest.raises(ValueError, match=f"^{re.escape(start)}") as refusal:
        parsed(line)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "a", "max_tokens": 1, "max_tokens": 3}', "max_tokens"),
        ('{"prompt": "a", "prompt": "a"}', "prompt"),
        ('{"prompt": "a", "logit_bias": {"7": 1, "8": 1, "7": 2}}', "7"),
    ],
)
def test_a_key_given_twice_is_refused_by_name(line, key):
    with pytest.raises(ValueError, match=rf'^f\.jsonl:2: "{key}" is given twice; which one is meant\?$'):
        parsed("", line)


def test_a_sampling_field_out_of_range_is_refused_with_place_and_field():
    with pytest.raises(ValueError, match=r"^f\.jsonl:2: .*top_p.*1\.5"):
        parsed('{"prompt": "a"}', '{"prompt": "a", "top_p": 1.5}')


def test_an_unknown_field_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ValueError, match=r"^f\.jsonl:1: .*temprature.*did you mean 'temperature'\?"):
        parsed('{"prompt": "a", "temprature": 1}')


def test_two_requests_may_not_share_an_id(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text('{"prompt": "b", "id": "0"}\n', "utf-8")
    with pytest.raises(ValueError, match=r"f\.jsonl:1: id '0' is taken by --prompt 1; ids must differ$"):
        gather_prompts(["a"], file, BASE)


def test_no_prompt_at_all_is_refused():
    message = "there is nothing to decode: give --prompt TEXT, or --prompts FILE with one JSON object a line"
    with pytest.raises(ValueError, match=f"^{message}$"):
        gather_prompts([], None, BASE)


@pytest.fixture
def gathered(tmp_path):
    """gathered(bytes) -> the prompts of a file with them."""

    def read(content: bytes):
        file = tmp_path / "f.jsonl"
        file.write_bytes(content)
        return gather_prompts([], file, BASE)

    return read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r"f\.jsonl:1: not UTF-8 text: byte 0xff as character 1$"),
        (b'{"prompt": "a"}\n{"prompt": "n\xe9"}\n', r"f\.jsonl:2: not UTF-8 text: byte 0xe9 as character 14$"),
    ],
)
def test_a_file_that_is_not_text_is_refused_with_the_line(gathered, content, message):
    with pytest.raises(ValueError, match=message):
        gathered(content)


def test_a_byte_order_mark_at_the_start_of_a_file_is_skipped(gathered):
    assert [prompt.text for prompt in gathered(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')] == ["a", "b"]


def test_an_id_that_is_taken_is_shortened_in_the_message(gathered):
    line = json.dumps({"prompt": "a", "id": "x" * 5000}).encode()
    with pytest.raises(ValueError, match=r"f\.jsonl:2: id 'xxx.*\.\.\. is taken by .*f\.jsonl:1; ids must") as refusal:
        gathered(line + b"\n" + line)
    assert len(str(refusal.value)) < 500


def test_bytes_on_the_command_line_that_are_no_text_are_refused_with_place():
    with pytest.raises(ValueError, match=r"^--prompt 2: not UTF-8 text: byte 0xff as character 2$"):
        gather_prompts(["a", os.fsdecode(b"b\xffc")], None, BASE)


def test_a_prompt_that_the_locale_could_not_read_is_read_as_utf8():
    unread = "né".encode().decode("ascii", errors="surrogateescape")
    assert [prompt.text for prompt in gather_prompts([unread], None, BASE)] == ["né"]
