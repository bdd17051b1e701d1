"""What unusable input gets: one line that says what, where and what to do, and nothing written."""

import gzip
import os
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibrate.corpus import files
from calibrate.errors import UsageError

from .conftest import build_tokenizer, write_jsonl

GOOD = '{"text": "a good row of text"}\n'
CHAT = [{"role": "user", "content": "Hello?"}]


@pytest.fixture
def refused(load):
    """The message of the UsageError that loading raises; it is one line."""

    def run(data=None, **options):
        with pytest.raises(UsageError) as caught:
            load(data, **options)
        message = str(caught.value)
        assert "\n" not in message
        assert caught.value.exit_code == 2
        return message

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "--samples is 0: it must be at least 1"),
        ({"sequence_length": 0}, "--sequence-length is 0: it must be at least 1"),
        ({"seed": -1}, "--seed is -1: it must not be negative"),
        (
            {"sequence_length": 4096, "context_length": 2048},
            "--sequence-length 4096 is more than the model's context of 2048 tokens: give at most that",
        ),
        ({"text_column": "a", "chat_column": "b"}, "both a text column (a) and a chat column (b) are given: give one"),
        ({"data": "builtin:latin"}, "there is no built-in corpus 'builtin:latin'; there are: builtin, builtin:code, random"),
        ({"data": "no-such.jsonl"}, "no such file or folder: no-such.jsonl (a hub dataset is written hub:org/name)"),
        ({"data": "no/such.jsonl"}, "no such file or folder: no/such.jsonl (a hub dataset is written hub:org/name)"),
        ({"data": "hub:a/b/c"}, "'a/b/c' is no hub dataset: write hub:org/name, hub:org/name:config or hub:org/name:config@split"),
    ],
)
def test_options(refused, options, message):
    assert refused(**options) == message


def test_empty(tmp_path, refused):
    (tmp_path / "a.jsonl").touch()
    assert refused(tmp_path / "a.jsonl") == f"{tmp_path}/a.jsonl is empty: give a corpus with text"
    assert refused(tmp_path) == f"{tmp_path} holds no text: every document in it is empty"
    (tmp_path / "blank.txt").write_text(" \n\n")
    assert refused(tmp_path / "blank.txt") == f"{tmp_path}/blank.txt holds no text: every document in it is empty"
    (tmp_path / "folder").mkdir()
    assert re.match(f"{tmp_path}/folder holds no data files: put some of .jsonl", refused(tmp_path / "folder"))


def test_nulls_only(tmp_path, refused):
    write_jsonl(tmp_path / "a.jsonl", [{"text": None}] * 3)
    assert refused(tmp_path / "a.jsonl", text_column="text") == f"{tmp_path}/a.jsonl holds no text: every document in it is empty"
    assert "has no column of text; it has: text" in refused(tmp_path / "a.jsonl")


def test_unknown_format(tmp_path, refused):
    (tmp_path / "a.docx").write_text("x")
    assert refused(tmp_path / "a.docx").startswith(f"{tmp_path}/a.docx is of no known format: give one of .jsonl .ndjson .json .parquet")


def test_no_text_column(tmp_path, refused):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "score": 0.5}])
    assert refused(path) == f"{path} has no column of text; it has: id, score: name one with --text-column or --chat-column"


@pytest.mark.parametrize("option", ["text_column", "chat_column"])
def test_no_such_column(tmp_path, refused, option):
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "text": "x"}])
    assert refused(path, **{option: "body"}) == f"{path} has no column 'body'; it has: id, text"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_broken_json_line(tmp_path, refused, name):
    path = tmp_path / name
    path.write_text(GOOD * 2 + '{"text": "cut\n' + GOOD)
    assert refused(path) == f"{path}:3: broken JSON: Invalid control character at at column 14"


def test_broken_json_line_beyond_the_first_rows(tmp_path, refused):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress((GOOD * 150 + "{'text': 1}\n").encode()))
    assert refused(path) == f"{path}:151: broken JSON: Expecting property name enclosed in double quotes at column 2"


def test_broken_json_document(tmp_path, refused):
    path = tmp_path / "a.json"
    path.write_text('[\n {"text": "x"},\n {"text": }\n]')
    assert refused(path) == f"{path}:3: broken JSON: Expecting value at column 11"


def test_row_is_no_object(tmp_path, refused):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + "[1, 2]\n")
    assert refused(path) == f"{path}:2: the row is list, not an object with columns"


def test_value_is_no_text(tmp_path, refused):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 120 + [{"text": 7}])
    assert refused(path) == f"{path}:121: column 'text' holds int, not text"


def test_half_a_character(tmp_path, refused):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab\\ud83d"}\n')
    assert refused(path) == f"{path}:1: column 'text' holds half a character (a lone \\ud83d) at position 2"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_wrong_encoding_of_a_line(tmp_path, refused, name):
    path = tmp_path / name
    first = GOOD if name.endswith("jsonl") else "text\n"
    path.write_bytes(first.encode() + '{"text": "café"}\n'.encode("latin-1"))
    assert refused(path) == f"{path}:2: not UTF-8 text (byte 13 of the line): save the file as UTF-8"


def test_wrong_encoding_of_a_text(tmp_path, refused):
    path = tmp_path / "a.txt"
    path.write_bytes("un café".encode("latin-1"))
    assert refused(path) == f"{path} is not UTF-8 text (byte 6): save it as UTF-8"
    path.write_bytes("some text".encode("utf-16"))
    assert refused(path) == f"{path} is not UTF-8 text (byte 0): save it as UTF-8"


def test_corrupt_parquet(tmp_path, refused):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    assert refused(path).startswith(f"{path} is not a readable Parquet file: Parquet magic bytes not found in footer")
    pq.write_table(pa.table({"text": ["some text that fills pages"] * 5000}), path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    assert refused(path).startswith(("cannot read", f"{path} is not a readable Parquet file: "))


def test_corrupt_csv(tmp_path, refused):
    path = tmp_path / "a.csv"
    path.write_text('text,id\nfine,1\n"a ""quoted"" one",2\nx,3,4\n')
    assert refused(path) == f"{path}:4: more fields than the header's 2"
    path.write_text('text,id\nfine,1\n"never closed,2\n')
    assert refused(path) == f"{path}:3: broken CSV in row 2: unexpected end of data"


@pytest.mark.parametrize("content", [gzip.compress(GOOD.encode() * 500, mtime=0)[:-20], b"no gzip at all"], ids=["cut short", "no gzip"])
def test_corrupt_compression(tmp_path, refused, content):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    assert str(path) in refused(path)


def test_missing_decompressor(tmp_path, refused, monkeypatch):
    def unknown(*args, **more):
        raise ValueError("Compression type zstd not supported")

    monkeypatch.setattr(files.LocalFileSystem, "open", unknown)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    assert refused(tmp_path / "a.jsonl.zst") == (
        f"{tmp_path}/a.jsonl.zst needs a decompressor that is not installed (Compression type zstd not supported): "
        "decompress it, or pip install zstandard"
    )


def test_no_permission(tmp_path, refused):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    if os.geteuid() != 0:
        path.chmod(0)
        assert refused(path) == f"cannot read {path}: Permission denied"
        return
    shared = tmp_path.parents[1]  # root reads everything: become somebody else for a moment
    path.chmod(0)
    modes = [(folder, folder.stat().st_mode) for folder in (tmp_path, tmp_path.parent, shared)]
    for folder, _ in modes:
        folder.chmod(0o755)
    os.seteuid(65534)
    try:
        assert refused(path) == f"cannot read {path}: Permission denied"
    finally:
        os.seteuid(0)
        for folder, mode in modes:
            folder.chmod(mode)


def test_corpus_shorter_than_one_sequence(tmp_path, refused, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a few words"}, {"text": "and a few more"}])
    total = sum(len(tokenizer(text)["input_ids"]) for text in ("a few words", "and a few more"))
    expected = f"corpus has {total} tokens, shorter than one sequence of 1024: give more text or a lower --sequence-length"
    assert refused(path, sequence_length=1024) == expected
    assert refused(path, sequence_length=1024, samples=1) == expected


def test_short_documents_of_a_long_corpus_are_no_error(tmp_path, load):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a few words"}] * 100)
    assert len(load(path, sequence_length=64, samples=1).samples) == 1


def test_token_outside_the_vocabulary(tmp_path, refused, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "zzz"}])
    token = max(tokenizer("zzz")["input_ids"])
    assert refused(path, vocab_size=token) == (
        f"a.jsonl:1: token id {token} is outside the model's vocabulary of {token}: the tokenizer is not this model's"
    )


def test_chat_without_template(tmp_path, refused, plain_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    message = (
        f"{path} holds chats (column 'messages') but the tokenizer has no chat template: "
        "name a column of text with --text-column, or use a tokenizer with a template"
    )
    assert refused(path, with_tokenizer=plain_tokenizer) == message
    assert refused(path, with_tokenizer=plain_tokenizer, chat_column="messages") == message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("no list", "column 'messages' is no chat: a list of {role, content} is wanted, and this is other text"),
        ([{"who": "x"}], "column 'messages' is no chat: a list of {role, content} or {from, value} is wanted"),
        ([{"role": None, "content": "x"}], "column 'messages', message 1 has no role: its role is NoneType"),
        ([*CHAT, {"role": "user", "content": 5}], "column 'messages', message 2: its content is int, not text"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "column 'messages', message 1 holds a part of type image: only text can be calibrated on",
        ),
    ],
)
def test_malformed_chat(tmp_path, refused, row, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 101 + [{"messages": row}])
    assert refused(path) == f"{path}:102: {message}"


def test_template_refuses_the_chat(tmp_path, refused):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "narrator", "content": "Once."}]}])
    assert refused(path) == ("a.jsonl:1: the tokenizer's chat template refuses this chat: unknown role narrator: correct or remove it")


def test_broken_template(tmp_path, refused):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    broken = build_tokenizer("{% for %}")
    assert "the tokenizer's chat template refuses this chat" in refused(path, with_tokenizer=broken)


def test_nothing_is_written(tmp_path, refused, monkeypatch):
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "a.jsonl").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    refused(tmp_path / "a.jsonl")
    assert sorted(tmp_path.rglob("*")) == before
