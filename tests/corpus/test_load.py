"""Built-in and random sources, the hub, provenance, and the same bytes every time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import huggingface_hub
import numpy as np
import pytest

from calibrate.corpus import plan_batches
from calibrate.errors import UsageError

from .conftest import write_jsonl


def test_builtin_is_the_default(load, tokenizer):
    corpus = load(samples=8, sequence_length=64)
    assert [sample.document for sample in corpus.samples] == list(range(8))
    for sample in corpus.samples:
        assert np.array_equal(sample.tokens, tokenizer(topics[sample.source.removeprefix("builtin:")])["input_ids"][:64])
    assert load("builtin", samples=8, sequence_length=64).digest == corpus.digest
    assert load("default.yaml", samples=8, sequence_length=64).digest == corpus.digest


def test_builtin_second_chunks_come_after_all_first_ones(load):
    corpus = load("builtin", samples=len(topics) + 10, sequence_length=64)
    documents = [sample.document for sample in corpus.samples]
    assert corpus.documents == len(topics)
    assert documents[: len(topics)] == list(range(len(topics)))
    assert documents[len(topics) :] == sorted(documents[len(topics) :])


def test_builtin_code(load):
    assert all(sample.source.endswith(".py") for sample in load("builtin:code", samples=4, sequence_length=64).samples)


def test_random(load, tokenizer):
    corpus = load("random", samples=3, sequence_length=50, seed=7)
    allowed = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    expected = allowed[np.random.Generator(np.random.PCG64(7)).integers(len(allowed), size=(3, 50))]
    assert np.array_equal(np.stack([sample.tokens for sample in corpus.samples]), expected)
    assert [sample.source for sample in corpus.samples] == ["random:1", "random:2", "random:3"]
    large = load("random", samples=400, sequence_length=200, vocab_size=300)
    assert set(np.concatenate([sample.tokens for sample in large.samples])) == set(range(300)) - set(tokenizer.all_special_ids)


def test_random_without_ordinary_tokens(load):
    with pytest.raises(UsageError, match="every token of the vocabulary is special"):
        load("random", vocab_size=3)


def test_description_is_provenance(load):
    corpus = load("builtin", samples=5, sequence_length=64, seed=3)
    description = json.loads(json.dumps(corpus.description))
    assert len(description.pop("tokenizer")) == 64
    assert description == {
        "data": "builtin",
        "description": None,
        "sources": [{"data": "builtin", "weight": 1.0, "documents": 5, "rows": 5}],
        "samples": 5,
        "samples_asked": 5,
        "tokens": 320,
        "documents": 5,
        "sequence_length": 64,
        "seed": 3,
    }


def test_seed_samples_and_length_change_the_digest(load):
    digests = [
        load("builtin", **{"samples": 5, "sequence_length": 64, **change}).digest
        for change in ({}, {"seed": 1}, {"samples": 6}, {"sequence_length": 63})
    ]
    assert len(set(digests)) == 4


def test_tokenizer_digest_ignores_state_but_not_the_template(load, plain_tokenizer, tokenizer):
    first = load("builtin").description["tokenizer"]
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert load("builtin").description["tokenizer"] == first
    assert load("builtin", with_tokenizer=plain_tokenizer).description["tokenizer"] != first


SCRIPT = """
import hashlib, sys
from calibrate.corpus import CorpusOptions, load_corpus, plan_batches
from tests_corpus_tokenizer import build_tokenizer
tokenizer = build_tokenizer()
options = CorpusOptions(data=sys.argv[1], samples=30, sequence_length=32)
corpus = load_corpus(options, tokenizer, vocab_size=len(tokenizer), context_length=None)
digest = hashlib.sha256()
for batch in plan_batches(corpus, 256, 0):
    for array in (batch.input_ids, batch.lengths, batch.samples):
        digest.update(array.tobytes())
print(corpus.digest, digest.hexdigest(), corpus.description)
"""


def test_same_bytes_in_another_process_with_another_hash_seed(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abc":
        write_jsonl(folder / f"{name}.jsonl", [{"text": f"document {number} of {name}, with a few more words"} for number in range(20)])
    (folder / "d.txt").write_text("A text of its own. " * 30)
    (tmp_path / "mix.yaml").write_text("description: x\nsources: [{data: data, weight: 2}, {data: builtin, weight: 1}, {data: random, weight: 1}]")
    (tmp_path / "tests_corpus_tokenizer.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    root = Path(__file__).parents[2]
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
        command = [sys.executable, "-c", SCRIPT, "mix.yaml"]
        outputs.append(subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 128


def test_every_token_reaches_a_batch(load):
    corpus = load("builtin", samples=60, sequence_length=64)
    batches = plan_batches(corpus, 512, 0)
    assert sum(int(batch.lengths.sum()) for batch in batches) == corpus.description["tokens"]
    assert {batch.part for batch in batches} == {0, 1, 2, 3}


class Hub:
    """Stands for the hub: what was asked, and a streamed dataset as the answer."""

    def __init__(self, monkeypatch, rows):
        self.asked = []
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda api, name, **more: type("Info", (), {"sha": "abc123"}))
        monkeypatch.setattr(datasets, "load_dataset", lambda *names, **more: self.asked.append((names, more)) or stream)


@pytest.mark.parametrize(
    ("data", "names", "split"),
    [
        ("hub:org/name", ("org/name", None), "train"),
        ("org/name:en", ("org/name", "en"), "train"),
        ("org/name:en@test", ("org/name", "en"), "test"),
        ("hub:name@validation", ("name", None), "validation"),
    ],
)
def test_hub(monkeypatch, load, data, names, split):
    hub = Hub(monkeypatch, [{"text": f"document {number} with some words"} for number in range(50)])
    corpus = load(data, samples=6, sequence_length=8)
    assert hub.asked == [(names, {"split": split, "revision": "abc123", "streaming": True})]
    assert [sample.source for sample in corpus.samples] == [f"hub:{names[0]}:{number}" for number in range(1, 7)]
    assert corpus.description["sources"][0]["revision"] == "abc123"
    assert load(data, samples=6, sequence_length=8).digest == corpus.digest != load(data, samples=6, sequence_length=8, seed=1).digest


def test_hub_out_of_reach(load):
    code = (
        "from types import SimpleNamespace\nfrom calibrate.corpus import CorpusOptions, load_corpus\n"
        "from calibrate.errors import UsageError\n"
        "try:\n    load_corpus(CorpusOptions(data='org/name'), SimpleNamespace(all_special_ids=[]), vocab_size=9, context_length=None)\n"
        "except UsageError as error:\n    print(error)\n"
    )
    root = Path(__file__).parents[2]

    def message(**environment):
        ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, cwd=root, check=True, capture_output=True, text=True)
        assert ran.stderr == ""
        return ran.stdout

    assert message(HF_HUB_OFFLINE="1") == "hub dataset org/name cannot be read: HF_HUB_OFFLINE is set: unset it, or give a local file or folder\n"
    unreachable = message(HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.startswith("hub dataset org/name cannot be read: [Errno 111] Connection refused: check its name and the network")


def test_hub_without_the_split(monkeypatch, load):
    Hub(monkeypatch, [{"text": "x"}] * 2)

    def refuse(*names, **more):
        raise ValueError('Bad split: dev. Available splits: ["train"]')

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UsageError, match=r"hub dataset org/name cannot be read: Bad split: dev. Available splits: \[.train.\]"):
        load("org/name@dev")
