import io
import json

from launch.service.logs import Log


def said(form, *args, **kwargs) -> str:
    stream = io.StringIO()
    Log(form, stream=stream, clock=lambda: 1_700_000_000.25).say(*args, **kwargs)
    return stream.getvalue()


def test_a_line_of_json_has_time_level_words_and_place():
    line = said("json", "it broke", level="error", rank=3, step=17, request="a", phase="combine")
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "error", "text": "it broke", "rank": 3, "step": 17,
        "request": "a", "phase": "combine",
    }  # fmt: skip


def test_a_line_of_text_says_the_same_to_people():
    line = said("text", "it broke", level="warning", rank=3)
    assert line.endswith(" warning: it broke rank=3\n")


def test_what_a_client_sent_cannot_forge_a_line():
    for form in ("json", "text"):
        line = said(form, "refused", request="a\n12:00:00 ready\x1b[31m")
        assert line.count("\n") == 1
        assert "\x1b" not in line
