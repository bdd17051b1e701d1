"""Documents → token ids."""

import json
from typing import Any

import numpy as np

from calibrate.artefact import sha256_bytes
from calibrate.corpus.chat import encode_chat
from calibrate.corpus.types import Document
from calibrate.errors import UsageError

CHARACTERS_A_TOKEN = 32  # far above any tokenizer's mean: so much text surely fills a row


class Encoder:
    """A tokenizer with the model's vocabulary to check it against."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, document: Document, tokens: int) -> tuple[np.ndarray, bool]:
        """Token ids, int32 [length], and whether they are the whole document: of a long text only enough for `tokens` is tokenized.

        Raises:
            UsageError: the chat template refuses the chat, or an id is outside the model's vocabulary.
        """
        limit = tokens * CHARACTERS_A_TOKEN
        if document.text is None:
            ids, whole = encode_chat(self._tokenizer, document), True
        else:
            whole = len(document.text) <= limit
            # verbose: a document longer than the context is meant here, it is cut into rows
            ids = self._tokenizer(document.text[:limit], add_special_tokens=True, verbose=False)["input_ids"]
        encoded = np.array(ids, dtype=np.int32)
        if len(encoded) and encoded.max() >= self._vocab_size:
            raise UsageError(
                f"{document.source}: token id {encoded.max()} is outside the model's vocabulary of {self._vocab_size}: "
                "the tokenizer is not this model's"
            )
        return encoded, whole


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex SHA-256 over what decides the token ids: the tokenizer's definition and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        definition = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # set by earlier calls, and not used here
            definition.pop(state, None)
    else:
        definition = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    template = getattr(tokenizer, "chat_template", None)
    return sha256_bytes(json.dumps([definition, template], sort_keys=True).encode())
