"""Texts and chats as rows of tokens."""

import bisect
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .chats import Chat, common
from .folder import FolderError
from .records import records

Array = np.ndarray
#: A row's arrays, see `rows`.
Row = dict[str, Array]


#: Of a model without a chat template, as in https://github.com/tatsu-lab/stanford_alpaca.
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that"
    " appropriately completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
PAIRED = "paired with an input that provides further context"


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens, and which of them are learned."""

    tokens: Sequence[int]
    learned: Sequence[bool]
    whole: bool = False  # it is never cut between two rows, as a chat


def documents(path: pathlib.Path, tokenizer: Any) -> list[Document]:
    """Reads the documents of a file, see `records` and `documents_of`."""
    found = [
        document
        for where, record in records(path)
        for document in documents_of(where, record, tokenizer)
    ]
    if not any(any(x.learned) for x in found):
        raise FolderError(f"{path} has nothing to learn: it is empty.")
    return found


def documents_of(where: str, record: Any, tokenizer: Any) -> list[Document]:
    """Reads one record, by its fields.

    `messages` is a chat, whose assistant's turns are learned with the tokens that end
    them. `prompt` and `completion` are two strings or two lists of messages, of which
    the second is learned. `instruction`, `input` and `output` are Alpaca's: a chat, or
    Alpaca's own text without a chat template. `text` is learned as a whole.
    """
    match record:
        case {"messages": [*messages]}:
            known = 0
        case {"prompt": [*prompt], "completion": [*answer]}:
            messages, known = [*prompt, *answer], len(prompt)
        case {"prompt": str(prompt), "completion": str(answer)}:
            return [_completed(prompt, answer, tokenizer)]
        case {"instruction": str(task), "output": str(answer)}:
            given = record.get("input") or ""
            if tokenizer.chat_template is None:
                paired = ", paired with an input that provides further context"
                more = f"### Input:\n{given}\n\n"
                prompt = ALPACA.format(
                    *(paired, task, more) if given else ("", task, "")
                )
                return [_completed(prompt, answer, tokenizer)]
            asked = "\n".join(filter(None, (task, given)))
            pair = ("user", asked), ("assistant", answer)
            messages, known = [{"role": x, "content": y} for x, y in pair], 1
        case {"text": str(text)}:
            return [_text(text, tokenizer)]
        case _:
            messages, known = [None], 0
    tools = record.get("tools") if isinstance(record, dict) else None
    turns = Chat.of(where, messages, tools, tokenizer, known).turns()
    return [Document(*turn, whole=True) for turn in turns]


def _completed(prompt: str, answer: str, tokenizer: Any) -> Document:
    """A text that is learned from where it differs from its prompt."""
    tokens = _text(prompt + answer, tokenizer).tokens
    start = common(_text(prompt, tokenizer).tokens, tokens)
    return Document(tokens, [n >= start for n in range(len(tokens))], whole=True)


def _text(text: str, tokenizer: Any) -> Document:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FolderError(f"a text is no Unicode: {error}.") from None
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    tokens = tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"]
    last = tokenizer.eos_token_id
    if text.strip() and last is not None and tokens[-1] != last:
        tokens = [*tokens, last]
    return Document(tokens, [bool(text.strip())] * len(tokens))


def fitted(
    found: Iterable[Document], length: int, too_long: str
) -> tuple[list[Document], int]:
    """Cuts whole documents that are longer than a row, or leaves them out.

    Args:
      found: Documents.
      length: Tokens a row.
      too_long: `"right"` keeps their first tokens, `"left"` their last, `"drop"` none.

    Returns:
      The documents, and the number of those that were longer.
    """
    fit, count = list[Document](), 0
    for x in found:
        if x.whole and len(x.tokens) > length + 1:
            count += 1
            kept = slice(-length - 1, None) if too_long == "left" else slice(length + 1)
            x = dataclasses.replace(x, tokens=x.tokens[kept], learned=x.learned[kept])
            if too_long == "drop" or not any(x.learned[1:]):
                continue
        fit.append(x)
    return fit, count


def rows(found: Sequence[Document], length: int) -> list[Row]:
    """Packs documents into rows of so many tokens.

    Whole documents go where they fit best, the longest first; the others are cut from
    row to row.

    Returns:
      For each row: `tokens` and the `labels` that follow them; `positions` and
      `segments`, which number the row's documents; `weights`, 1 where the label is of
      the same document and learned.
    """
    chats = [x for x in found if x.whole]
    packed = [*_cut([x for x in found if not x.whole], length), *_fit(chats, length)]
    return [row for row in packed if row["weights"].any()]


def _row(
    length: int, tokens: Array, labels: Array, document: Array, learned: Array
) -> Row:
    """A row of tokens, and of their documents' numbers, filled up by no document."""
    begins = np.searchsorted(document, document)
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "positions": np.arange(len(document)) - begins,
        "segments": document - document[:1] + 1,
        "weights": learned,
    }
    types, missing = {"weights": np.float32}, (0, length - len(tokens))
    padded = {name: np.pad(x, missing) for name, x in arrays.items()}
    return {name: x.astype(types.get(name, np.int32)) for name, x in padded.items()}


def _join(
    found: Sequence[Document], part: slice = slice(None)
) -> tuple[Array, Array, Array]:
    """The tokens of a part of each document, its number, and whether it is learned."""
    tokens = [np.asarray(x.tokens[part], np.int32) for x in found]
    learned = [np.asarray(x.learned[part], bool) for x in found]
    numbers = np.repeat(np.arange(len(found)), [len(x) for x in tokens])
    return np.concatenate(tokens), numbers, np.concatenate(learned)


def _cut(found: Sequence[Document], length: int) -> Iterator[Row]:
    """Cuts documents, one after the other, into rows."""
    if not found:
        return
    tokens, documents, learned = _join(found)
    for start in range(0, max(len(tokens) - 1, 0), length):
        chosen = slice(start, min(start + length, len(tokens) - 1))
        after = slice(chosen.start + 1, chosen.stop + 1)
        known = learned[after] & (documents[after] == documents[chosen])
        yield _row(length, tokens[chosen], tokens[after], documents[chosen], known)


def _fit(found: Sequence[Document], length: int) -> Iterator[Row]:
    """Packs documents by best fit, the longest first (best-fit decreasing)."""
    space = list[tuple[int, int]]()  # of each row, in order of size; and its number
    packed = list[list[Document]]()
    for x in sorted(found, key=lambda x: -len(x.tokens)):
        needed = len(x.tokens) - 1
        at = bisect.bisect_left(space, (needed, -1))
        free, row = space.pop(at) if at < len(space) else (length, len(packed))
        if row == len(packed):
            packed.append([])
        packed[row].append(x)
        bisect.insort(space, (free - needed, row))
    for row in packed:
        tokens, numbers, _ = _join(row, slice(-1))
        labels, _, learned = _join(row, slice(1, None))
        yield _row(length, tokens, labels, numbers, learned)


def batches(found: Sequence[Row], size: int, seed: int) -> Iterator[Row]:
    """Without end: rows in another order each time, `size` a batch, stacked."""
    draw, waiting = np.random.default_rng(seed), list[Row]()
    while True:
        while len(waiting) < size:
            waiting += [found[n] for n in draw.permutation(len(found))]
        yield stacked(waiting[:size])
        waiting = waiting[size:]


def stacked(found: Sequence[Row]) -> Row:
    """Rows along a leading axis."""
    return {name: np.stack([row[name] for row in found]) for name in found[0]}
