import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from launch.command.text import TextCodec

TINY = Path(__file__).resolve().parents[3] / "profiles" / "models" / "tiny-v3"
BOS, EOS = "<bos>", "<eos>"


def byte_tokenizer() -> Tokenizer:
    """A token a byte, so that most characters beyond ASCII are cut by every token border."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()


def word_tokenizer() -> Tokenizer:
    """Words with the space in front, where a text's first word is decoded without its space."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁bee": 1, "s": 2, "▁": 3}, unk_token="▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """Tokens 0 to 255 are bytes, 256 is a word; bytes in a row that are not all UTF-8 are each shown as U+FFFD."""
    pieces = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("▁a", 0.0)], 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def folder(path: Path, tokenizer: Tokenizer, **settings) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def opened(path: Path) -> TextCodec:
    codec = TextCodec.open(path)
    assert codec is not None
    return codec


def test_tiny_v3_gets_no_bos_and_reads_back():
    codec = opened(TINY)
    ids = codec.encode('The "assert" statement')
    assert 0 not in ids
    assert codec.decode(ids) == 'The "assert" statement'


def test_a_folder_without_a_tokenizer_has_no_codec(tmp_path):
    assert TextCodec.open(tmp_path) is None


def test_a_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer that can be read: "):
        TextCodec.open(tmp_path)


@pytest.mark.parametrize("bos_token", [BOS, {"content": BOS, "lstrip": False}])
def test_add_bos_token_puts_one_bos_in_front(tmp_path, bos_token):
    codec = opened(folder(tmp_path, byte_tokenizer(), add_bos_token=True, bos_token=bos_token))
    plain = byte_tokenizer()
    assert codec.encode("hi") == [plain.token_to_id(BOS), *plain.encode("hi").ids]


def test_a_bos_from_the_post_processor_is_not_doubled(tmp_path):
    tokenizer = byte_tokenizer()
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    codec = opened(folder(tmp_path, tokenizer, add_bos_token=True, bos_token=BOS))
    assert codec.encode("hi") == [bos, *byte_tokenizer().encode("hi").ids]


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}])
def test_without_either_there_is_no_bos(tmp_path, settings):
    codec = opened(folder(tmp_path, byte_tokenizer(), bos_token=BOS, **settings))
    assert codec.encode("hi") == byte_tokenizer().encode("hi").ids


def test_a_bos_that_is_asked_for_but_unknown_is_refused(tmp_path):
    folder(tmp_path, byte_tokenizer(), add_bos_token=True, bos_token="<s>")
    with pytest.raises(ValueError, match=r"add_bos_token is true, but bos_token \('<s>'\) is not in the vocabulary"):
        TextCodec.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "is not JSON: "),
        ("[" * 200_000, "is not JSON: "),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON: "),
        ("\xff", "is not JSON: "),
        ("[]", "must hold an object"),
        ('{"add_bos_token": "yes", "bos_token": "<bos>"}', "add_bos_token must be true or false"),
        ('{"add_bos_token": true, "bos_token": 5}', "add_bos_token is true, but bos_token is not a text"),
        ('{"add_bos_token": true, "bos_token": {"content": []}}', "add_bos_token is true, but bos_token is not a text"),
        ('{"add_bos_token": true, "bos_token": ["<bos>"]}', "add_bos_token is true, but bos_token is not a text"),
        ('{"add_bos_token": true}', "add_bos_token is true, but bos_token is not a text"),
        (
            r'{"add_bos_token": true, "bos_token": "\ud800"}',
            r"add_bos_token is true, but bos_token \('\\ud800'\) is not",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_refused_naming_the_file_and_the_field(tmp_path, content, fault):
    folder(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json:? {fault}") as refusal:
        TextCodec.open(tmp_path)
    assert len(str(refusal.value)) < 500


def test_a_folder_whose_name_is_no_text_is_read(tmp_path):
    odd = tmp_path / os.fsdecode(b"m\xff")
    odd.mkdir()
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "tokenizer.json").rename(odd / "tokenizer.json")
    assert opened(odd).decode(opened(odd).encode("hi")) == "hi"


def test_a_character_of_three_bytes_appears_when_it_is_whole():
    codec = TextCodec(BYTES)
    stream = codec.stream()
    a, *euro, b = codec.encode("a€b")
    assert len(euro) == 3
    assert [stream.push([token]) for token in [a, *euro, b]] == ["a", "", "", "€", "b"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_is_shown_when_the_output_ends():
    codec = TextCodec(BYTES)
    stream = codec.stream()
    first, second, _ = codec.encode("€")
    assert stream.push([first, second]) == ""
    assert stream.finish() == codec.decode([first, second])


def test_special_tokens_are_not_shown():
    codec = TextCodec(BYTES)
    eos = byte_tokenizer().token_to_id(EOS)
    assert codec.stream().push([*codec.encode("ok"), eos]) == "ok"


def test_the_first_word_of_an_output_keeps_its_space_after_a_prompt():
    codec = TextCodec(word_tokenizer())
    assert codec.stream(prompt=[0]).push([1]) == " bee"
    assert codec.stream().push([1]) == "bee"


@pytest.mark.parametrize("cut", [1, 2])
def test_a_character_that_the_prompt_began_appears_when_the_output_completes_it(cut):
    codec = TextCodec(BYTES)
    euro = codec.encode("€")
    stream = codec.stream([*codec.encode("12345 é"), *euro[:cut]])
    pieces = [stream.push([token]) for token in [*euro[cut:], *codec.encode("b")]]
    assert pieces == [*[""] * (2 - cut), "€", "b"]


@pytest.mark.parametrize("cut", [1, 2])
def test_the_same_where_a_run_of_bytes_is_decoded_as_a_whole(cut):
    codec = TextCodec(fallback_tokenizer())
    e_acute, euro = list("é".encode()), list("€".encode())
    stream = codec.stream([*e_acute, *euro[:cut]])
    assert "".join(stream.push([token]) for token in [*euro[cut:], 256]) == "€ a"


def test_a_character_that_the_prompt_began_and_nothing_completes_is_left_to_the_prompt():
    codec = TextCodec(BYTES)
    first, second, _ = codec.encode("€")
    assert codec.stream([first]).push(codec.encode("b")) == "b"
    stream = codec.stream([first])
    assert (stream.push([second]), stream.finish()) == ("", "")


def test_a_prompt_that_ends_in_the_replacement_character_itself_is_not_repeated():
    codec = TextCodec(BYTES)
    assert codec.stream(codec.encode("a\ufffd")).push(codec.encode("b")) == "b"


def test_words_pushed_one_by_one_keep_their_spaces():
    codec = TextCodec(word_tokenizer())
    stream = codec.stream()
    assert [stream.push([token]) for token in (0, 1, 2, 0)] == ["a", " bee", "s", " a"]


@given(st.text(max_size=20), st.data())
def test_prompt_and_pieces_joined_are_the_whole_wherever_the_text_is_cut(text, data):
    codec = TextCodec(BYTES)
    tokens = codec.encode(text)
    cut = data.draw(st.integers(0, len(tokens)))
    stream = codec.stream(tokens[:cut])
    pieces = [stream.push([token]) for token in tokens[cut:]]
    whole = bytes(text, "utf-8")[:cut].decode(errors="ignore")
    assert whole + "".join([*pieces, stream.finish()]) == (text if cut < len(tokens) else whole)


@given(st.text(max_size=20), st.lists(st.integers(0, 257), max_size=30), st.data())
def test_the_pieces_joined_are_the_text_of_the_whole(text, noise, data):
    codec = TextCodec(BYTES)
    tokens = codec.encode(text) + noise
    stream, pieces = codec.stream(), []
    while tokens:
        size = data.draw(st.integers(1, 4))
        pieces.append(stream.push(tokens[:size]))
        tokens = tokens[size:]
    pieces.append(stream.finish())
    assert "".join(pieces) == codec.decode(codec.encode(text) + noise)
