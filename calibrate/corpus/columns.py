"""Which columns of a table hold the text, and a row's document."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from calibrate.corpus.chat import looks_like_chat, parse_messages
from calibrate.corpus.types import Document
from calibrate.errors import UsageError

PEEK = 100  # rows looked at before columns are chosen
_CHAT_NAMES = ("messages", "conversations", "conversation", "chat", "dialogue")
_TEXT_NAMES = ("text", "content", "document", "article", "body", "markdown", "passage", "story", "code", "transcript")
_PAIRS = tuple(
    (question, answer)
    for question, answers in {
        "instruction": ("output", "response"),
        "question": ("answer", "response"),
        "prompt": ("completion", "response", "output", "answer"),
        "query": ("response", "answer"),
        "problem": ("solution", "answer"),
    }.items()
    for answer in answers
)


@dataclass(frozen=True)
class Wanted:
    """What the user asked for, and whether the tokenizer can render chats."""

    text_column: str | None
    chat_column: str | None
    has_template: bool


@dataclass(frozen=True)
class Columns:
    """A choice: `kind` is "text", "chat" or "pair"; `names` the columns, a pair's as (question, [input,] answer)."""

    kind: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {' + '.join(self.names)}"


def table_documents(rows: Iterator[tuple[int, Any]], path: str, label: str, wanted: Wanted, found: Callable[[Columns], None]) -> Iterator[Document]:
    """Documents of a table; rows whose columns are null or blank are skipped. `found` is told the choice, once.

    Raises:
        UsageError: no usable column, a row that is no object, or a value that is no text or chat; the message names `path` and the row.
    """
    head = list(islice(rows, PEEK))
    for number, row in head:
        _check_row(row, f"{path}:{number}")
    if not head:
        return
    columns = choose([row for _, row in head], path, wanted)
    found(columns)
    for number, row in chain(head, rows):
        _check_row(row, f"{path}:{number}")
        document = _document(row, columns, f"{path}:{number}", f"{label}:{number}", wanted.has_template)
        if document is not None:
            yield document


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: the row is {type(row).__name__}, not an object with columns")


def choose(rows: list[dict], path: str, wanted: Wanted) -> Columns:
    """Choose by name and content: chats first (given a template), then question and answer, then text by name, then the longest strings."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    explicit = wanted.text_column or wanted.chat_column
    if explicit is not None:
        if explicit not in names:
            raise UsageError(f"{path} has no column '{explicit}'; it has: {', '.join(names)}")
        if wanted.chat_column is not None:
            _need_template(wanted, path, explicit)
        return Columns("chat" if wanted.chat_column is not None else "text", (explicit,))
    chats = [name for name in _preferred(names, _CHAT_NAMES, others=True) if _all(rows, name, looks_like_chat)]
    if chats and wanted.has_template:
        return Columns("chat", (chats[0],))
    strings = {name.lower(): name for name in reversed(names) if _all(rows, name, lambda value: isinstance(value, str))}
    for question, answer in _PAIRS:
        if question in strings and answer in strings:
            middle = ("input",) if question == "instruction" and "input" in strings else ()
            return Columns("pair", tuple(strings[name] for name in (question, *middle, answer)))
    text = _text_column(rows, names, set(strings.values()))
    if text is None and chats:
        _need_template(wanted, path, chats[0])
    if text is None:
        raise UsageError(f"{path} has no column of text; it has: {', '.join(names) or 'none'}: name one with --text-column or --chat-column")
    return Columns("text", (text,))


def _text_column(rows: list[dict], names: list[str], strings: set[str]) -> str | None:
    for name in _preferred(names, _TEXT_NAMES, others=False):
        if name in strings:
            return name
    # max takes the first of equals, and names keep the table's order
    return max((name for name in names if name in strings), key=lambda name: sum(len(row.get(name) or "") for row in rows), default=None)


def _need_template(wanted: Wanted, path: str, column: str) -> None:
    if not wanted.has_template:
        raise UsageError(
            f"{path} holds chats (column '{column}') but the tokenizer has no chat template: "
            "name a column of text with --text-column, or use a tokenizer with a template"
        )


def _preferred(names: list[str], preferred: tuple[str, ...], *, others: bool) -> list[str]:
    known = [name for wish in preferred for name in names if name.lower() == wish]
    return known + [name for name in names if others and name not in known]


def _all(rows: list[dict], name: str, test: Callable[[Any], bool]) -> bool:
    """Whether the column holds anything, and only values that pass."""
    values = [row[name] for row in rows if row.get(name) not in (None, "", [])]
    return bool(values) and all(test(value) for value in values)


def _document(row: dict, columns: Columns, where: str, label: str, has_template: bool) -> Document | None:
    values = [row.get(name) for name in columns.names]
    if columns.kind == "chat":
        if not values[0]:
            return None
        messages = parse_messages(values[0], f"{where}: column '{columns.names[0]}'")
        for message in messages:
            _check_unicode(message["content"], where)
        return Document(label, messages=messages) if any(message["content"].strip() for message in messages) else None
    texts = [_text(value, f"{where}: column '{name}'") for name, value in zip(columns.names, values, strict=True)]
    if columns.kind == "text":
        return Document(label, text=texts[0]) if texts[0].strip() else None
    question, answer = "\n\n".join(text for text in texts[:-1] if text.strip()), texts[-1]
    if not question.strip() or not answer.strip():
        return None
    if not has_template:
        return Document(label, text=f"{question}\n\n{answer}")
    return Document(label, messages=({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def _text(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{where} holds {type(value).__name__}, not text")
    _check_unicode(value, where)
    return value


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise UsageError(f"{where} holds half a character (a lone \\u{ord(text[error.start]):04x}) at position {error.start}") from error
