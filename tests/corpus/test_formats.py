"""Every local format gives the same documents, with their place."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .conftest import write_jsonl

ROWS = [{"id": number, "text": text} for number, text in enumerate(["The first one, a row.", "Second – with “signs”.", "Third\nover two lines."])]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'id,text\n0,"The first one, a row."\n1,Second – with “signs”.\n2,"Third\nover two lines."\n'
TABLES = {
    "a.jsonl": LINES.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "windows.jsonl": LINES.replace("\n", "\r\n").encode(),
    "a.ndjson": LINES.encode(),
    "lines.json": LINES.encode(),
    "list.json": json.dumps(ROWS, indent=1).encode(),
    "one-line-list.json": json.dumps(ROWS).encode(),
    "wrapped.json": json.dumps({"data": ROWS}).encode(),
    "a.csv": CSV.encode(),
    "a.tsv": CSV.replace('0,"The first one, a row."', "0\tThe first one, a row.")
    .replace("id,", "id\t")
    .replace("\n1,", "\n1\t")
    .replace("\n2,", "\n2\t")
    .encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode()),
    "a.jsonl.bz2": bz2.compress(LINES.encode()),
    "a.csv.xz": lzma.compress(CSV.encode()),
}


@pytest.mark.parametrize("name", [*TABLES, "a.parquet"])
def test_table(tmp_path, load, texts, name):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_bytes(TABLES[name])
    corpus = load(path, sequence_length=32, samples=3)
    assert texts(corpus) == TEXTS
    assert sorted(sample.source for sample in corpus.samples) == [f"{name}:{number}" for number in (1, 2, 3)]
    assert corpus.description["sources"][0]["columns"] == ["text: text"]
    assert all(sample.tokens.dtype == np.int32 for sample in corpus.samples)


def test_blank_lines_count_as_lines_and_empty_rows_are_skipped(tmp_path, load):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "One of the documents."}\n\n{"text": ""}\n{"text": null}\n{}\n{"text": "  "}\n{"text": "The other of them."}\n')
    assert sorted(sample.source for sample in load(path, samples=2, sequence_length=4).samples) == ["a.jsonl:2", "a.jsonl:8"]


@pytest.mark.parametrize("name", ["notes.txt", "notes.md", "notes.txt.gz"])
def test_text_file_is_one_document(tmp_path, load, texts, tokenizer, name):
    text = "One paragraph.\n\nAnother – the last.\n"
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else b"\xef\xbb\xbf" + text.encode())
    length = len(tokenizer(text)["input_ids"])
    corpus = load(tmp_path / name, samples=1, sequence_length=length, context_length=length)
    assert texts(corpus) == [text]
    assert (corpus.documents, corpus.samples[0].source) == (1, name)


def test_long_text_is_cut_into_consecutive_rows(tmp_path, load, tokenizer):
    text = "the quick brown fox jumps over the lazy dog again and again " * 200
    (tmp_path / "a.txt").write_text(text)
    corpus = load(tmp_path / "a.txt", samples=5, sequence_length=32)
    assert np.array_equal(np.concatenate([sample.tokens for sample in corpus.samples]), tokenizer(text)["input_ids"][: 5 * 32])


def test_only_the_needed_part_of_a_long_text_is_tokenized(tmp_path, load, tokenizer, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "word and word " * 20_000}, {"text": "other and other " * 20_000}])
    seen = []
    call = type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda self, text, **more: seen.append(len(text)) or call(self, text, **more))
    corpus = load(tmp_path / "a.jsonl", samples=2, sequence_length=16)
    assert [len(sample.tokens) for sample in corpus.samples] == [16, 16]
    assert max(seen) <= 16 * 32


def test_folder(tmp_path, load, texts):
    folder = tmp_path / "corpus"
    (folder / "deep" / ".git").mkdir(parents=True)
    write_jsonl(folder / "deep" / "a.jsonl", ROWS[:1])
    (folder / "b.txt").write_text(TEXTS[1], encoding="utf-8")
    (folder / "c.csv").write_text(f'body\n"{TEXTS[2]}"\n')
    (folder / "empty.txt").touch()
    for ignored in (".hidden.txt", "deep/.git/x.txt", "picture.png"):
        (folder / ignored).write_text("not to be read")
    (tmp_path / "outside.txt").write_text("not to be read either")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "broken.txt").symlink_to(folder / "nothing")
    corpus = load(folder, samples=3, sequence_length=32)
    assert sorted(sample.source for sample in corpus.samples) == ["b.txt", "c.csv:1", "deep/a.jsonl:1"]
    assert sorted(texts(corpus)) == sorted(TEXTS)
    assert corpus.description["sources"][0]["files"] == 4
    assert corpus.description["sources"][0]["columns"] == ["text: body", "text: text"]


def test_every_file_of_a_folder_takes_part(tmp_path, load):
    for name in "abcd":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"document {number} of {name}"} for number in range(50)])
    sources = {sample.source[0] for sample in load(tmp_path, samples=40, sequence_length=4).samples}
    assert sources == set("abcd")
