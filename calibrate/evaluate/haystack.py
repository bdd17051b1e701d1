"""The long text: where it comes from, its sentences, and a prompt of an exact length with statements at exact depths."""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from calibrate.artefact import sha256_bytes
from calibrate.corpus.options import SourceSpec
from calibrate.corpus.sources import Setting, open_source
from calibrate.corpus.types import Document
from calibrate.errors import UsageError
from calibrate.evaluate.needle_tasks import Hidden
from calibrate.evaluate.prompts import Prompter

BUILTIN = "builtin"
_TEXTS = 3  # so many times the longest prompt is read, where there is so much: cells get different stretches
_NEAR = 4  # words before the found beginning that are tried too
_LONGEST_DOCUMENT = 1 << 26  # characters of one document that are read at most
# A sentence ends at . ! ? before white space and no small letter, at 。！？ anywhere (closing quotes and brackets included), or at an empty line.
_SENTENCE_END = re.compile(r"""[.!?]["'”’)\]]*\s+(?![a-z\s])|[。！？]["'”’』」）)\]]*\s*|\n[ \t]*\n\s*""")
# Where a text may begin: at a word, at a mark, or at any letter of a script that is written without spaces.
_UNSPACED = r"\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+|[^\w\s]|_")


@dataclass(frozen=True)
class Haystack:
    """Sentences in their order, each with the white space that follows it.

    Attributes:
        data: what it was read from.
        sentences: joined they are the text.
        ends: tokens up to and with each sentence.
    """

    data: str
    sentences: tuple[str, ...]
    ends: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.ends[-1]

    def describe(self) -> dict[str, Any]:
        """For the result: what was read."""
        return {"data": self.data, "tokens": self.tokens, "sha256": sha256_bytes("".join(self.sentences).encode())}

    def repeated(self, tokens: int) -> "Haystack":
        """The same text again and again, until there are `tokens`."""
        times = -(-tokens // self.tokens)
        ends = tuple(turn * self.tokens + end for turn in range(times) for end in self.ends)
        return Haystack(self.data, self.sentences * times, ends)


def read_haystack(data: str, prompter: Prompter, longest: int, *, seed: int, repeat: bool = False) -> Haystack:
    """Text for prompts of up to `longest` tokens from any source of `--data` that holds text.

    Raises:
        UsageError: no such source, no text in it, or too little of it and `repeat` is not set.
    """
    if data == "random":
        raise UsageError("random tokens have no sentences to hide a needle between: give a haystack of text")
    setting = Setting(_Letters(), [], 0, 1, _LONGEST_DOCUMENT, "train")
    source = open_source(SourceSpec(data=data, weight=1.0), None, setting, [seed])
    haystack = _enough(data, lambda documents: [_text(rows.chunks) for rows in source.take(documents)], prompter, _TEXTS * longest)
    if haystack.tokens >= longest:
        return haystack
    if not repeat:
        raise UsageError(
            f"haystack {data} has {haystack.tokens:,} tokens, too few for a prompt of {longest:,}: give more text, less length or --repeat-haystack"
        )
    return haystack.repeated(longest + haystack.tokens)


class _Letters:
    """Stands where the corpus has its tokenizer: documents come as code points, so that any source gives back its text."""

    has_template = False

    def encode(self, document: Document, tokens: int) -> tuple[np.ndarray, bool]:
        return np.frombuffer(document.text.strip().encode("utf-32-le"), dtype=np.int32), True


def _text(chunks: tuple[np.ndarray, ...]) -> str:
    return b"".join(chunk.tobytes() for chunk in chunks).decode("utf-32-le")


def _enough(data: str, take: Callable[[int], list[str]], prompter: Prompter, tokens: int) -> Haystack:
    """Whole documents, in the source's seeded order, until there are `tokens` or no more documents."""
    sentences: list[str] = []
    total, read, documents = 0, 0, 8
    counts: list[int] = []
    while total < tokens:
        texts = take(documents)
        for text in texts[read:]:
            new = split_sentences(text + "\n\n")
            sentences += new
            counts += prompter.counts(new)
        total, read = sum(counts), len(texts)
        if read < documents:
            break
        documents *= 2
    if not total:
        raise UsageError(f"haystack {data} holds no text")
    return Haystack(data, tuple(sentences), tuple(accumulate(counts)))


def split_sentences(text: str) -> list[str]:
    """Sentences with the white space after them; joined they are the text."""
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if start < end]


@dataclass(frozen=True)
class Placed:
    """A text with statements in it.

    Attributes:
        text: all of it.
        bare: the haystack's part alone.
        tokens: of the prompt that `render` made of it.
    """

    text: str
    bare: str
    tokens: list[int]


def place(
    haystack: Haystack,
    hidden: Sequence[Hidden],
    render: Callable[[str], list[int]],
    length: int,
    prompter: Prompter,
    generator: np.random.Generator,
) -> Placed:
    """A stretch of the haystack with the statements, as long as fits into a prompt of `length` tokens.

    The stretch ends at a sentence end that `generator` draws, and begins at whichever word makes the prompt as long as it may be, often within
    a sentence: so both the length and the needles' sentence ends are met.

    Raises:
        UsageError: the question and the statements alone are longer than `length`.
    """
    needed = len(render("".join(f"{each.statement} " for each in hidden)))
    if needed > length:
        raise UsageError(f"a prompt of {length} tokens has no room: question, template and statements alone take {needed}")
    first = bisect_left(haystack.ends, length)
    last = int(generator.integers(min(first, len(haystack.ends) - 1), len(haystack.ends)))
    start = _sentence_before(haystack, last, length)
    sentences, counts = haystack.sentences[start : last + 1], np.diff([0, *haystack.ends])[start : last + 1].tolist()
    text = "".join(sentences)
    words = [match.start() for match in _WORD.finditer(text)] + [len(text)]

    def attempt(word: int) -> Placed:
        rest, pieces, sizes = _from(words[word], sentences, counts, prompter)
        placed = insert(pieces, sizes, hidden)
        return Placed(placed, rest, render(placed))

    return _longest_that_fits(attempt, len(words), length)


def _sentence_before(haystack: Haystack, last: int, tokens: int) -> int:
    """The first sentence of a stretch that ends with `last` and surely holds `tokens` (or the first of all)."""
    return max(0, bisect_left(haystack.ends, haystack.ends[last] - tokens - tokens // 8) - 1)


def _longest_that_fits(attempt: Callable[[int], Placed], words: int, length: int) -> Placed:
    """The prompt of at most `length` tokens that begins earliest. The last beginning, no haystack at all, fits.

    Tokens grow about evenly with words, so every other guess is by proportion; the others halve what is left, whatever the text.
    """
    low, high = -1, words - 1  # low is too long, or before the first word
    best = attempt(high)
    size = {high: len(best.tokens)}
    while high - low > 1:
        middle = (low + high) // 2
        if low in size and len(size) % 2:
            share = (length - size[high]) / (size[low] - size[high])
            middle = min(max(high - round(share * (high - low)), low + 1), high - 1)
        placed = attempt(middle)
        size[middle] = len(placed.tokens)
        if size[middle] > length:
            low = middle
            continue
        high = middle
        if size[middle] >= len(best.tokens):
            best = placed
    for word in range(max(high - _NEAR, 0), high):  # tokens do not grow strictly: a needle may have moved to another border
        if word not in size and len(best.tokens) < length:
            placed = attempt(word)
            best = placed if len(best.tokens) < len(placed.tokens) <= length else best
    return best


def _from(start: int, sentences: Sequence[str], counts: Sequence[int], prompter: Prompter) -> tuple[str, list[str], list[int]]:
    """The text from character `start` on, its sentences and their tokens."""
    index = 0
    while index < len(sentences) and start >= len(sentences[index]):
        start -= len(sentences[index])
        index += 1
    pieces, sizes = list(sentences[index:]), list(counts[index:])
    if pieces and start:
        pieces[0] = pieces[0][start:]
        sizes[0] = prompter.count(pieces[0])
    return "".join(pieces), pieces, sizes


def insert(pieces: Sequence[str], sizes: Sequence[int], hidden: Sequence[Hidden]) -> str:
    """The sentences with each statement at the border whose depth in tokens is nearest to the one asked for; the start is a border too."""
    borders = np.array([0, *accumulate(sizes)])
    at: dict[int, list[str]] = {}
    for each in sorted(hidden, key=lambda each: each.depth):
        at.setdefault(int(np.argmin(np.abs(borders - each.depth * borders[-1]))), []).append(each.statement)
    text = ""
    for border in range(len(pieces) + 1):
        for statement in at.get(border, []):
            text = _join(text, statement)
        text = _join(text, pieces[border], glue=border in at) if border < len(pieces) else text
    return text.strip()


def _join(left: str, right: str, *, glue: bool = True) -> str:
    """One space between, where there is none yet and a side is written with spaces."""
    spaced = bool(left) and not left[-1].isspace() and (left[-1].isascii() or right[:1].isascii())
    return f"{left} {right}" if glue and spaced else left + right
