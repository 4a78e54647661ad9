"""Texts and chats as rows of tokens."""

import bisect
import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .chats import Chat, common
from .folder import FolderError
from .records import records

Array = np.ndarray
#: Arrays of a row: `tokens` and the `labels` that follow them; `positions` and
#: `segments`, which number the documents; `weights`, 1 where a label is learned.
Row = dict[str, Array]
#: For models without a template, from https://github.com/tatsu-lab/stanford_alpaca.
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that"
    " appropriately completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
PAIRED = ", paired with an input that provides further context"


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens, true for those that are learned, and true if they are in one row."""

    tokens: Sequence[int]
    learned: Sequence[bool]
    whole: bool = False


#: Of one record, or of several.
Documents = list[Document]


def documents(path: pathlib.Path, tokenizer: Any) -> list[Documents]:
    """Reads a file's `records` as documents, see `documents_of`."""
    found = [documents_of(*place, tokenizer) for place in records(path)]
    if not any(any(x.learned) for parts in found for x in parts):
        raise FolderError(f"{path} has nothing to learn: it is empty, or blank.")
    return found


def divided(found: list[Documents], share: float, seed: int) -> list[Documents]:
    """Holds out a share of the records, drawn at random; of one text, its end."""
    count, ((first, *_), *others) = math.ceil(share * len(found)), found
    if count and not others and not first.whole:
        at = math.ceil((1 - share) * len(first.tokens))
        halves = ((x[:at], x[at:]) for x in (first.tokens, first.learned))
        return [[Document(*half)] for half in zip(*halves, strict=True)]
    order = np.random.default_rng(seed).permutation(len(found)).tolist()
    parts = sorted(order[count:]), order[:count]
    return [[x for n in part for x in found[n]] for part in parts]


def documents_of(where: str, record: Any, tokenizer: Any) -> Documents:
    """Reads one record, by its fields, as `docs/start.md` says."""
    match record:
        case {"messages": [*messages]}:
            known = 0
        case {"prompt": [*prompt], "completion": [*answer]}:
            messages, known = [*prompt, *answer], len(prompt)
        case {"prompt": str(prompt), "completion": str(answer)}:
            return [_completed(prompt, answer, tokenizer)]
        case {"instruction": str(task), "output": str(answer)}:
            more = record.get("input") or ""
            if tokenizer.chat_template is None:
                parts = (PAIRED, task, f"### Input:\n{more}\n\n")
                prompt = ALPACA.format(*(parts if more else ("", task, "")))
                return [_completed(prompt, answer, tokenizer)]
            question = "\n".join(filter(None, (task, more)))
            pair = ("user", question), ("assistant", answer)
            messages, known = [{"role": x, "content": y} for x, y in pair], 1
        case {"text": str(text)}:
            return [_text(text, tokenizer)]
        case {"conversations": _}:
            how = "conversations to messages, from to role, value to content"
            raise FolderError(f"{where} is ShareGPT's: rename {how}.")
        case {"messages": x}:
            raise FolderError(f"{where} has messages={x!r:.60}: give a list.")
        case {"prompt": x, "completion": y}:
            kinds = f"prompt is a {type(x).__name__}, completion a {type(y).__name__}"
            raise FolderError(f"{where}: {kinds}: give two texts, or two lists.")
        case _:
            raise FolderError(
                f"{where} has no messages of role and content, no prompt and completion"
                " (two texts or two lists), no instruction and output, and no text."
            )
    turns = Chat.of(where, messages, record, tokenizer, known).turns()
    return [Document(*turn, whole=True) for turn in turns]


def _completed(prompt: str, answer: str, tokenizer: Any) -> Document:
    tokens = _text(prompt + answer, tokenizer).tokens
    start = common(_text(prompt, tokenizer, ends=False).tokens, tokens)
    return Document(tokens, [n >= start for n in range(len(tokens))], whole=True)


def _text(text: str, tokenizer: Any, *, ends: bool = True) -> Document:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FolderError(f"a text is no Unicode: {error}.") from None
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    tokens = tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"]
    last = tokenizer.eos_token_id
    if ends and text.strip() and last is not None and tokens[-1] != last:
        tokens = [*tokens, last]
    return Document(tokens, [bool(text.strip())] * len(tokens))


def fitted(found: Documents, length: int, too_long: str) -> tuple[Documents, int]:
    """Cuts whole documents that are longer than a row, and counts them."""
    fit, longer = list[Document](), 0
    for x in found:
        if x.whole and len(x.tokens) > length + 1:
            longer += 1
            kept = slice(-length - 1, None) if too_long == "left" else slice(length + 1)
            x = Document(x.tokens[kept], x.learned[kept], whole=True)
            if too_long == "drop" or not any(x.learned[1:]):
                continue
        fit.append(x)
    return fit, longer


def rows(found: Sequence[Document], length: int) -> list[Row]:
    """Packs documents into rows of so many tokens: whole ones by best fit."""
    whole = [x for x in found if x.whole]
    packed = [*_cut([x for x in found if not x.whole], length), *_fit(whole, length)]
    return [row for row in packed if row["weights"].any()]


def _row(
    length: int, tokens: Array, labels: Array, document: Array, learned: Array
) -> Row:
    """Pads with segment 0; `document` has each token's document, in order."""
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "positions": np.arange(len(document)) - np.searchsorted(document, document),
        "segments": document - document[:1] + 1,
        "weights": learned,
    }
    types, missing = {"weights": np.float32}, (0, length - len(tokens))
    padded = {name: np.pad(x, missing) for name, x in arrays.items()}
    return {name: x.astype(types.get(name, np.int32)) for name, x in padded.items()}


def _join(
    found: Sequence[Document], part: slice = slice(None)
) -> tuple[Array, Array, Array]:
    """Joins a part of each document: tokens, the documents' numbers, and `learned`."""
    tokens = [np.asarray(x.tokens[part], np.int32) for x in found]
    learned = [np.asarray(x.learned[part], bool) for x in found]
    numbers = np.repeat(np.arange(len(found)), [len(x) for x in tokens])
    return np.concatenate(tokens), numbers, np.concatenate(learned)


def _cut(found: Sequence[Document], length: int) -> Iterator[Row]:
    if not found:
        return
    tokens, numbers, learned = _join(found)
    for start in range(0, max(len(tokens) - 1, 0), length):
        part = slice(start, min(start + length, len(tokens) - 1))
        after = slice(part.start + 1, part.stop + 1)
        known = learned[after] & (numbers[after] == numbers[part])
        yield _row(length, tokens[part], tokens[after], numbers[part], known)


def _fit(found: Sequence[Document], length: int) -> Iterator[Row]:
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
    """Yields `size` stacked rows, without end, in another order each time."""
    draw, waiting = np.random.default_rng(seed), list[Row]()
    while True:
        while len(waiting) < size:
            waiting += [found[n] for n in draw.permutation(len(found))]
        yield stacked(waiting[:size])
        waiting = waiting[size:]


def stacked(found: Sequence[Row]) -> Row:
    return {name: np.stack([row[name] for row in found]) for name in found[0]}
