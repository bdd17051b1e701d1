"""Chats: every common way to write them down → messages that a chat template takes."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from calibrate.corpus.types import Document
from calibrate.errors import UsageError

_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
# Some templates print today's date. Pinned, so that the same corpus gives the same tokens tomorrow.
_TODAY = datetime(2024, 7, 26)
PINNED_DATE = {"date_string": _TODAY.strftime("%d %b %Y"), "strftime_now": _TODAY.strftime}


def looks_like_chat(value: Any) -> bool:
    """A non-empty list of {role, content} or {from, value}."""
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0 and all(_is_message(message) for message in value)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and ({"role", "content"} <= message.keys() or {"from", "value"} <= message.keys())


def parse_messages(value: Any, where: str) -> tuple[dict, ...]:
    """The messages of one row as {role, content, ...}: roles by their common names, content as one string, other keys (tool calls) kept.

    Raises:
        UsageError: not a chat, or a content that is no text; the message starts with `where`.
    """
    if isinstance(value, str):  # a JSON list in a CSV cell
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where} is no chat: a list of {{role, content}} is wanted, and this is other text") from error
    if not looks_like_chat(value):
        raise UsageError(f"{where} is no chat: a list of {{role, content}} or {{from, value}} is wanted")
    return tuple(_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1))


def _message(message: dict, where: str) -> dict:
    old = {"role", "content"} <= message.keys()
    role, content = (message["role"], message["content"]) if old else (message["from"], message["value"])
    if not isinstance(role, str):
        raise UsageError(f"{where} has no role: its role is {type(role).__name__}")
    # Parquet fills the keys of every message with nulls; templates take a null key for a given one.
    others = {key: held for key, held in message.items() if key not in ("role", "content", "from", "value") and held is not None}
    return {"role": _ROLES.get(role.lower(), role.lower()), "content": _content(content, where), **others}


def _content(content: Any, where: str) -> str:
    if content is None:  # a turn that is only a tool call
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(part, where) for part in content)
    raise UsageError(f"{where}: its content is {type(content).__name__}, not text")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return part["text"]
    kind = part.get("type", "unnamed") if isinstance(part, dict) else type(part).__name__
    raise UsageError(f"{where} holds a part of type {kind}: only text can be calibrated on")


def encode_chat(tokenizer: Any, document: Document) -> list[int]:
    """Token ids of the chat under the tokenizer's template.

    A template without a system role gets the system message at the head of the first user message.

    Raises:
        UsageError: the template refuses the chat.
    """
    messages = list(document.messages)
    try:
        return _apply(tokenizer, messages)
    except TemplateError as error:
        folded = _fold_system(messages)
        if folded is None:
            raise _refused(document, error) from error
    try:
        return _apply(tokenizer, folded)
    except TemplateError as error:
        raise _refused(document, error) from error


def _apply(tokenizer: Any, messages: list[dict]) -> list[int]:
    encoded = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **PINNED_DATE)
    return encoded["input_ids"]


def _fold_system(messages: list[dict]) -> list[dict] | None:
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return None
    return [{**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}, *messages[2:]]


def _refused(document: Document, error: TemplateError) -> UsageError:
    return UsageError(f"{document.source}: the tokenizer's chat template refuses this chat: {' '.join(str(error).split())}: correct or remove it")
