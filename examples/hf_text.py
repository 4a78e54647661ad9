"""Text, and chats in the folder's own template, as rows of tokens."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from hf_folder import FolderError

#: A row's arrays, see `rows`.
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens, and which of them are to be learned."""

    tokens: Sequence[int]
    learned: Sequence[bool]


def documents(path: pathlib.Path, tokenizer: Any) -> list[Document]:
    """A file's documents: of `.jsonl` a chat or a text a line, else the whole file.

    A line is `{"messages": [{"role": ..., "content": ...}]}`, of which the assistant's
    turns are learned, or `{"text": ...}`.

    Raises:
      FolderError: If it is empty, or if a line is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} cannot be read as text: {error}.") from None
    if path.suffix != ".jsonl":
        found = [_text(text, tokenizer)]
    else:
        lines = enumerate(text.splitlines(), 1)
        found = [_line(path, n, line, tokenizer) for n, line in lines if line.strip()]
    if not any(any(each.learned) for each in found):
        raise FolderError(f"{path} has nothing to learn: it is empty.")
    return found


def _text(text: str, tokenizer: Any) -> Document:
    tokens = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
    if text.strip() and tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
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
    tokens: list[int] = []
    learned: list[bool] = []
    for n, message in enumerate(messages, 1):
        # A turn is what the template adds to the turns before it.
        if message["role"] == "assistant":
            prompt = _tokens(tokenizer, messages[: n - 1], add_generation_prompt=True)
            learned += [False] * (len(prompt) - len(tokens))
        whole = _tokens(tokenizer, messages[:n])
        answer = message["role"] == "assistant"
        learned += [answer] * (len(whole) - len(learned))
        tokens = whole
    return Document(tokens, learned[: len(tokens)])


def _is_message(x: Any) -> bool:
    known = isinstance(x, Mapping) and isinstance(x.get("role"), str)
    return known and isinstance(x.get("content"), str)


def _tokens(tokenizer: Any, messages: Sequence[Any], **how: bool) -> list[int]:
    if not messages:
        return []
    made = tokenizer.apply_chat_template(messages, tokenize=False, **how)
    return tokenizer(made, add_special_tokens=False, verbose=False)["input_ids"]


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
