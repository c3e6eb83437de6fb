import re

import pytest

from launch.prompts import gather_prompts, parse_lines
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
    ],
)
def test_a_bad_line_is_refused_with_place_and_field(line, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parsed(line)


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


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"f\.jsonl is not UTF-8 text: "):
        gather_prompts([], file, BASE)
