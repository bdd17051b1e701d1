import json
from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from calibrate.corpus import CorpusOptions, load_corpus

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
)


def build_tokenizer(template: str | None = TEMPLATE, vocabulary: int = 600) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on CPython's own documentation."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([topics[name] for name in sorted(topics)[:20]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", bos_token="<|start|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def plain_tokenizer():
    return build_tokenizer(template=None)


@pytest.fixture
def load(tokenizer):
    """load_corpus with small defaults; `with_tokenizer` replaces the tokenizer."""

    def run(data=None, *, with_tokenizer=None, vocab_size=None, context_length=None, **options):
        chosen = with_tokenizer or tokenizer
        settings = CorpusOptions(data=None if data is None else str(data), **{"samples": 4, "sequence_length": 16, **options})
        return load_corpus(settings, chosen, vocab_size=vocab_size or len(chosen), context_length=context_length)

    return run


@pytest.fixture
def texts(tokenizer):
    """The decoded rows of a corpus, in order of their source's name."""

    def decode(corpus):
        return [tokenizer.decode(sample.tokens) for sample in sorted(corpus.samples, key=lambda sample: sample.source)]

    return decode


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
