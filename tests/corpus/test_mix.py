"""Mix files: schema, shares, top-up, relative paths, interleaving."""

import pytest
import yaml

from calibrate.corpus.options import load_mix
from calibrate.errors import UsageError
from calibrate.resources import resource

from .conftest import write_jsonl


def write_mix(folder, *sources, **extra):
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump({"description": "a test", "sources": list(sources), **extra}))
    return path


@pytest.fixture
def folder(tmp_path):
    write_jsonl(tmp_path / "many.jsonl", [{"text": f"document {number} of many"} for number in range(200)])
    write_jsonl(tmp_path / "few.jsonl", [{"body": f"one of the few, {number}", "title": "x" * 99} for number in range(5)])
    return tmp_path


def test_shares_interleaving_and_relative_paths(folder, load, monkeypatch, tmp_path_factory):
    mix = write_mix(folder, {"data": "many.jsonl", "weight": 3}, {"data": "random", "weight": 1})
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    corpus = load(mix, samples=40, sequence_length=4)
    kinds = [sample.source.split(":")[0] for sample in corpus.samples]
    assert (kinds.count("many.jsonl"), kinds.count("random")) == (30, 10)
    assert all({"many.jsonl", "random"} == set(kinds[start : start + 10]) for start in range(0, 40, 10))  # each quarter holds both
    assert [sample.document for sample in corpus.samples] == list(range(40))
    assert [source["rows"] for source in corpus.description["sources"]] == [30, 10]
    assert corpus.description["description"] == "a test"


def test_top_up_with_a_note(folder, load, capsys):
    mix = write_mix(folder, {"data": "few.jsonl", "weight": 1, "text_column": "body"}, {"data": "many.jsonl", "weight": 1})
    corpus = load(mix, samples=40, sequence_length=32)
    assert [source["rows"] for source in corpus.description["sources"]] == [5, 35]
    assert capsys.readouterr().err == "corpus: few.jsonl has 5 rows, fewer than its share of 20: the other sources fill in as far as they can\n"
    assert corpus.description["sources"][0]["columns"] == ["text: body"]


def test_fewer_rows_than_asked(folder, load, capsys):
    corpus = load(folder / "few.jsonl", samples=40, sequence_length=32, text_column="body")
    assert capsys.readouterr().err == "corpus: 5 rows, fewer than the 40 asked for: there is no more text\n"
    assert (corpus.description["samples"], corpus.description["samples_asked"]) == (5, 40)


def test_every_source_runs_out(folder, load):
    mix = write_mix(folder, {"data": "few.jsonl", "weight": 9}, {"data": "few.jsonl", "weight": 1})
    corpus = load(mix, samples=40, sequence_length=32, text_column="body")
    assert [source["rows"] for source in corpus.description["sources"]] == [5, 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("description: x\nsources: []\n", "sources: Tuple should have at least 1 item"),
        ("description: x\nsources:\n  - {data: builtin, weight: 1, wieght: 2}\n", "sources.0.wieght: Extra inputs are not permitted"),
        ("description: x\nsources:\n  - {data: builtin, weight: 0}\n", "sources.0.weight: Input should be greater than 0"),
        ("sources:\n  - {data: builtin, weight: 1}\n", "description: Field required"),
        ("just words", "the file: Input should be a valid dictionary"),
        ("", "the file: Input should be a valid dictionary"),
    ],
)
def test_schema(tmp_path, load, content, message):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} is not a corpus mix: {message}")


def test_not_yaml(tmp_path, load):
    path = tmp_path / "bad.yaml"
    path.write_text("description: x\nsources: [\n")
    with pytest.raises(UsageError, match=r"bad.yaml:3 is not YAML: "):
        load(path)
    path.write_bytes(b"description: caf\xe9")
    with pytest.raises(UsageError, match=r"bad.yaml is not UTF-8 text \(byte 16\)"):
        load(path)


def test_missing_mixes_and_sources(tmp_path, load):
    with pytest.raises(UsageError, match=r"cannot read .*/none.yaml: No such file or directory"):
        load(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"no such file: none.yaml, and no mix of this name is shipped; shipped are: code.yaml, default.yaml"):
        load("none.yaml")
    with pytest.raises(UsageError, match=f"no such file or folder: {tmp_path}/gone.jsonl"):
        load(write_mix(tmp_path, {"data": "gone.jsonl", "weight": 1}))
    with pytest.raises(UsageError, match=r"names the mix other.yaml: a mix holds sources, not mixes"):
        load(write_mix(tmp_path, {"data": "other.yaml", "weight": 1}))
    with pytest.raises(UsageError, match=r"source random has both text_column and chat_column"):
        load(write_mix(tmp_path, {"data": "random", "weight": 1, "text_column": "a", "chat_column": "b"}))


def test_an_empty_source_of_a_mix_is_named(folder, load):
    (folder / "empty.txt").write_text("\n")
    mix = write_mix(folder, {"data": "many.jsonl", "weight": 1}, {"data": "empty.txt", "weight": 1})
    with pytest.raises(UsageError, match=r"empty.txt holds no text"):
        load(mix)


@pytest.mark.parametrize("path", sorted(resource("data").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_mixes(path, load):
    """Each shipped corpus mix is of the schema and, where it needs no network, gives full rows."""
    mix = load_mix(path)
    corpus = load(path.name, samples=12, sequence_length=64)
    assert len(corpus.samples) == 12
    assert {source["data"] for source in corpus.description["sources"]} == {source.data for source in mix.sources}
