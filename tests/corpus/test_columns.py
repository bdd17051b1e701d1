"""Text and chats are found by themselves; overrides win."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .conftest import build_tokenizer, write_jsonl

CHAT = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Good day."}]
RENDERED = "<|start|>user\nHello?<|end|>\n<|start|>assistant\nGood day.<|end|>\n"
SHAREGPT = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Good day."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]}, CHAT[1]]


@pytest.fixture
def render(tmp_path, load, tokenizer):
    """The one row's text, and the columns that were found."""

    def run(row, **options):
        path = write_jsonl(tmp_path / "a.jsonl", [row] * 8)  # enough tokens for one sequence
        corpus = load(path, samples=8, sequence_length=64, **options)
        return tokenizer.decode(corpus.samples[0].tokens), corpus.description["sources"][0]["columns"]

    return run


@pytest.mark.parametrize("name", ["messages", "conversations", "conversation", "chat", "dialogue", "Messages", "unheard_of"])
def test_chat_by_name_and_content(render, name):
    assert render({"id": "some text of the row", name: CHAT}) == (RENDERED, [f"chat: {name}"])


@pytest.mark.parametrize("chat", [SHAREGPT, PARTS])
def test_ways_to_write_a_chat(render, chat):
    assert render({"messages": chat}) == (RENDERED, ["chat: messages"])


def test_chat_in_parquet(tmp_path, load, tokenizer):
    rows = [{"messages": CHAT, "text": "x"}, {"messages": [{"role": "user", "content": "Hello?", "tool": "y"}, CHAT[1]], "text": "x"}]
    pq.write_table(pa.Table.from_pylist(rows * 4), tmp_path / "a.parquet")
    corpus = load(tmp_path / "a.parquet", samples=8, sequence_length=64)
    assert {tokenizer.decode(sample.tokens) for sample in corpus.samples} == {RENDERED}


def test_chat_as_json_in_a_cell(tmp_path, load, tokenizer):
    cell = json.dumps(CHAT).replace('"', '""')
    (tmp_path / "a.csv").write_text("id,chat\n" + f'1,"{cell}"\n' * 8)
    corpus = load(tmp_path / "a.csv", samples=8, sequence_length=64, chat_column="chat")
    assert {tokenizer.decode(sample.tokens) for sample in corpus.samples} == {RENDERED}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "Hello?", "answer": "Good day."}, "pair: question + answer"),
        ({"prompt": "Hello?", "response": "Good day.", "text": "other"}, "pair: prompt + response"),
        ({"instruction": "Hello?", "input": "", "output": "Good day."}, "pair: instruction + output"),
        ({"Problem": "Hello?", "Solution": "Good day."}, "pair: Problem + Solution"),
    ],
)
def test_pair_becomes_a_chat(render, row, columns):
    assert render(row) == (RENDERED, [columns])


def test_instruction_with_input(render):
    text, columns = render({"instruction": "Translate.", "input": "Hallo?", "output": "Hello?"})
    assert text == "<|start|>user\nTranslate.\n\nHallo?<|end|>\n<|start|>assistant\nHello?<|end|>\n"
    assert columns == ["pair: instruction + input + output"]


def test_pair_without_template_is_text(render, plain_tokenizer):
    assert render({"question": "Hello?", "answer": "Good day."} | {"pad": 1}, with_tokenizer=plain_tokenizer)[0] == "Hello?\n\nGood day."


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"title": "A long title that says it all", "text": "short"}, "text"),
        ({"url": "u", "body": "B", "summary": "longer than the body"}, "body"),
        ({"url": "u", "abstract": "the longest string there is", "year": 2020}, "abstract"),
        ({"text": 5, "other": "a string"}, "other"),
    ],
)
def test_text_column(render, row, column):
    assert render({**row, column: row[column] + " and words" * 8})[1] == [f"text: {column}"]


def test_overrides(render):
    row = {"messages": CHAT, "text": "plain text " * 9, "other": CHAT[:1] * 3}
    assert render(row)[1] == ["chat: messages"]
    assert render(row, text_column="text")[1] == ["text: text"]
    assert render(row, chat_column="other")[1] == ["chat: other"]


def test_chat_without_template_falls_to_text_where_there_is_some(render, plain_tokenizer):
    assert render({"messages": CHAT, "text": "plain text " * 9}, with_tokenizer=plain_tokenizer)[1] == ["text: text"]


def test_system_message_goes_to_the_user_where_the_template_has_none(render):
    strict = build_tokenizer(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    text, _ = render({"messages": [{"role": "system", "content": "Be brief."}, *CHAT] * 1}, with_tokenizer=strict)
    assert text == "Be brief.\n\nHello?Good day."


def test_dates_in_templates_are_pinned(render):
    dated = build_tokenizer("{{ strftime_now('%Y-%m-%d') }} {{ date_string }} {{ messages[0].content }}")
    assert render({"messages": CHAT}, with_tokenizer=dated)[0] == "2024-07-26 26 Jul 2024 Hello?"


def test_tool_call_turn_has_no_content(render):
    text, _ = render({"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]})
    assert text == "<|start|>user\nHello?<|end|>\n<|start|>assistant\n<|end|>\n"
