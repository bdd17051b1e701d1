"""From a question to the tokens that a model is asked with: its chat template where it has one, else a plain form."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from calibrate.corpus.chat import PINNED_DATE
from calibrate.errors import UsageError


class Prompter:
    """A tokenizer, and the form in which its model is asked.

    Attributes:
        form: "chat" or "plain".
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.form = "chat" if getattr(tokenizer, "chat_template", None) else "plain"

    def encode(self, message: str, plain: str) -> list[int]:
        """Token ids of `message` as a user's turn with the assistant's turn opened, or of `plain` for a model without a template.

        Raises:
            UsageError: the template refuses the message.
        """
        if self.form == "plain":
            return self._tokenizer(plain, add_special_tokens=True, verbose=False)["input_ids"]
        try:
            encoded = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": message}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                tokenizer_kwargs={"verbose": False},  # a prompt that is too long is refused by its asker
                enable_thinking=False,
                **PINNED_DATE,
            )
        except TemplateError as error:
            raise UsageError(f"the tokenizer's chat template refuses a user's question: {' '.join(str(error).split())}") from error
        return encoded["input_ids"]

    def count(self, text: str) -> int:
        """Tokens of a piece of text by itself."""
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each of many pieces."""
        return [len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]] if texts else []

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def stop_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's and those of generation_config.json. Raises UsageError where that file is damaged."""
    path = checkpoint / "generation_config.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} is not a readable JSON object: {error}") from error
    listed = named if isinstance(named, list) else [named]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})
