"""Text, and chats in the folder's own template, as rows of tokens."""

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from .folder import FolderError

#: A row's arrays, see `rows`.
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens, and which of them are to be learned."""

    tokens: Sequence[int]
    learned: Sequence[bool]


def documents(path: pathlib.Path, tokenizer: Any) -> list[Document]:
    """A file's documents: of `.jsonl` a chat or a text a line, else the whole file.

    Of a chat the tokens of the assistant's turns are learned, and what ends them.

    A line is `{"messages": [{"role": ..., "content": ...}]}`, of which the assistant's
    turns are learned, or `{"text": ...}`.

    Raises:
      FolderError: If it is empty, or if a line is neither.
    """
    if path.suffix == ".json":
        raise FolderError(f"{path} is one JSON: give .jsonl, a chat or text a line.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} cannot be read as text: {error}.") from None
    if path.suffix != ".jsonl":
        found = [_text(text, tokenizer)]
    else:
        lines = enumerate(text.split("\n"), 1)  # strings may have other line ends
        found = [_line(path, n, line, tokenizer) for n, line in lines if line.strip()]
    if not any(any(each.learned) for each in found):
        raise FolderError(f"{path} has nothing to learn: it is empty.")
    return found


def _text(text: str, tokenizer: Any) -> Document:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FolderError(f"a text is no Unicode: {error}.") from None
    tokens = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    last = tokenizer.eos_token_id
    if text.strip() and last is not None and tokens[-1] != last:
        tokens = [*tokens, last]
    return Document(tokens, [bool(text.strip())] * len(tokens))


def _line(path: pathlib.Path, number: int, line: str, tokenizer: Any) -> Document:
    where = f"{path}, line {number}"
    try:
        given = json.loads(line)
    except ValueError as error:
        raise FolderError(f"{where} is no JSON: {error}.") from None
    if isinstance(given, dict) and isinstance(given.get("text"), str):
        return _text(given["text"], tokenizer)
    messages = given.get("messages") if isinstance(given, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise FolderError(f"{where} has no messages of role and content, and no text.")
    if not any(x["role"] == "assistant" for x in messages):
        raise FolderError(
            f"{where} has no assistant's turn: there is nothing to learn."
        )
    if tokenizer.chat_template is None:
        raise FolderError("the tokenizer has no chat template: give plain text.")
    whole, spans = _rendered(where, messages, tokenizer, given.get("tools"))
    made = tokenizer(
        whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    starts = [start for start, _ in made["offset_mapping"]]
    learned = [any(a <= start < b for a, b in spans) for start in starts]
    return Document(made["input_ids"], learned)


def _rendered(
    where: str, messages: Sequence[Any], tokenizer: Any, tools: Any = None
) -> tuple[str, list[tuple[int, int]]]:
    """A chat in the template, and from where to where the assistant speaks.

    Templates may show a turn otherwise as soon as another one follows, as those do that
    leave thoughts out. So each turn is looked for in the whole: a mark stands for what
    the assistant says, which no other text has.
    """
    said = {
        n: message.get("content") or ""
        for n, message in enumerate(messages)
        if message["role"] == "assistant"
    }
    marks = {n: f"\ue000{n}\ue001" for n in said}
    marked = [
        {**message, "content": marks.get(n, message.get("content"))}
        for n, message in enumerate(messages)
    ]

    def render(turns: Sequence[Any], **how: bool) -> str:
        if not turns:
            return ""
        how = how if tools is None else {"tools": tools, **how}
        try:
            return tokenizer.apply_chat_template(list(turns), tokenize=False, **how)
        except (TemplateError, TypeError, ValueError) as error:
            raise FolderError(f"{where}: the chat template says: {error}.") from None

    whole, at = render(marked), 0
    pieces = list[str]()
    for n, mark in marks.items():
        before = render(marked[:n])
        prompt = render(marked[:n], add_generation_prompt=True)
        # What the template has the model go on from, such as "<|im_start|>assistant".
        header = prompt.removeprefix(before) if prompt.startswith(before) else prompt
        begin = spot = whole.find(mark, at)
        if spot < 0:
            break
        if prompt and whole.startswith(prompt):
            begin = len(prompt)
        elif header := header.partition("<think>")[0]:
            found = whole.rfind(header, at, spot)
            begin = spot if found < 0 else found + len(header)
        end = render(marked[: n + 1]).partition(mark)[2]
        end = os.path.commonprefix([end, whole[spot + len(mark) :]])
        pieces += [whole[at:begin], whole[begin:spot], said[n], end]
        at = spot + len(mark) + len(end)
    shown = render(messages)
    for kept in (str, str.strip):  # some templates strip what is said
        parts = [kept(x) if n % 4 == 2 else x for n, x in enumerate(pieces)]
        if "".join([*parts, whole[at:]]) == shown:
            ends = [*itertools.accumulate(map(len, parts), initial=0)]
            spans = [(ends[n + 1], ends[n + 4]) for n in range(0, len(parts), 4)]
            return shown, spans
    raise FolderError(
        f"{where}: the chat template does not show all that the assistant says as it is"
        " written. If it leaves earlier thoughts out, end the chat there."
    )


def _is_message(x: Any) -> bool:
    known = isinstance(x, Mapping) and isinstance(x.get("role"), str)
    content = x.get("content") if known else None
    return known and (isinstance(content, str) or bool(x.get("tool_calls")))


def rows(found: Sequence[Document], length: int) -> list[Row]:
    """Documents one after the other, cut into rows of so many tokens.

    Returns:
      For each row: `tokens` and the `labels` that follow them; `positions` and
      `segments`, which number the row's documents; `weights`, 1 where the label is of
      the same document and learned.
    """
    tokens = np.concatenate([np.asarray(x.tokens, np.int32) for x in found])
    learned = np.concatenate([np.asarray(x.learned, bool) for x in found])
    sizes = [len(x.tokens) for x in found]
    documents = np.repeat(np.arange(len(found)), sizes)
    made: list[Row] = []
    for start in range(0, max(len(tokens) - 1, 0), length):
        chosen = slice(start, min(start + length, len(tokens) - 1))
        after = slice(chosen.start + 1, chosen.stop + 1)
        document = documents[chosen]
        begins = np.searchsorted(document, document)
        row = {
            "tokens": tokens[chosen],
            "labels": tokens[after],
            "positions": np.arange(len(document)) - begins,
            "segments": document - document[0] + 1,
            "weights": learned[after] & (documents[after] == document),
        }
        missing = length - len(document)  # the last row is filled up by no document
        padded = {name: np.pad(x, (0, missing)) for name, x in row.items()}
        types = {"weights": np.float32}
        row = {n: x.astype(types.get(n, np.int32)) for n, x in padded.items()}
        if row["weights"].any():
            made.append(row)
    return made


def batches(found: Sequence[Row], size: int, seed: int) -> Iterator[Row]:
    """Without end: rows in another order each time, `size` a batch, stacked."""
    draw, waiting = np.random.default_rng(seed), list[Row]()
    while True:
        while len(waiting) < size:
            waiting += [found[n] for n in draw.permutation(len(found))]
        chosen, waiting = waiting[:size], waiting[size:]
        yield {name: np.stack([row[name] for row in chosen]) for name in chosen[0]}
