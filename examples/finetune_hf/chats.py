"""Chats in the folder's own template, and the tokens that the model writes in them."""

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from .folder import FolderError
from .records import parsed

#: Tokens, and for each of them true if it is learned.
Turn = tuple[list[int], list[bool]]

_USER = {"role": "user", "content": "x"}


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat, and the tokenizer whose template renders it."""

    where: str  # file and line, for messages
    messages: Sequence[Mapping[str, Any]]
    tools: Any
    tokenizer: Any
    known: int = 0  # messages of the prompt, which are not learned

    @classmethod
    def of(
        cls, where: str, messages: Any, tools: Any, tokenizer: Any, known: int = 0
    ) -> "Chat":
        if not all(map(_is_message, messages)):
            raise FolderError(
                f"{where} has no messages of role and content, no prompt and completion"
                " (two strings or two such lists), no instruction and output, and no"
                " text."
            )
        if not any(x["role"] == "assistant" for x in messages[known:]):
            raise FolderError(f"{where} has no assistant's turn: nothing to learn.")
        if tokenizer.chat_template is None:
            raise FolderError("the tokenizer has no chat template: give plain text.")
        tools = parsed(where, tools or "null") if isinstance(tools, str) else tools
        return cls(where, messages, tools, tokenizer, known)

    def turns(self) -> list[Turn]:
        """Returns documents in which the assistant's turns are learned.

        A turn is learned as the model writes it, after the prompt that the template
        renders for it. If the template renders it differently before a later turn, as
        those that remove earlier thoughts, it has a document of its own.
        """
        found = list[Turn]()
        for n in reversed(range(self.known, len(self.messages))):
            if self.messages[n]["role"] != "assistant":
                continue
            tokens, start, stop = self._turn(n)
            same = [x for x in found if x[0][:stop] == tokens[:stop]]
            if not same:
                found.append((tokens, [False] * len(tokens)))
            _, learned = (same or found)[-1]
            learned[start:stop] = [True] * (stop - start)
        return found[::-1]

    def _turn(self, n: int) -> tuple[list[int], int, int]:
        """Returns the tokens up to turn n, and where the turn begins and ends."""
        shown = self._rendered(self.messages[: n + 1])
        prompt, text = self._prompt(n, shown)
        self._refuse_hidden(n, text[len(os.path.commonprefix([prompt, text])) :])
        tokens = self._tokens(text)
        start = common(self._tokens(prompt), tokens)
        return tokens, start, len(tokens) - self._beyond(n, shown, tokens[start:])

    def _beyond(self, n: int, shown: str, written: Sequence[int]) -> int:
        """Counts the tokens that end the chat, after the one that ends turn n."""
        message = self.messages[n]
        try:
            followed = self._rendered([*self.messages[: n + 1], _USER])
        except FolderError:
            return 0
        tokens = self._tokens(shown)
        count = len(tokens) - common(self._tokens(followed), tokens)
        end = len(written) - count
        if end <= 0 or not (message.get("content") or message.get("tool_calls")):
            return 0
        special = set(self.tokenizer.all_special_ids)
        visible = lambda x: not self.tokenizer.decode([x]).isspace()
        last, more = (filter(visible, x) for x in (written[:end], written[end:]))
        return count if special.issuperset([*[*last][-1:], *more]) else 0

    def _prompt(self, n: int, shown: str) -> tuple[str, str]:
        """Returns the text before what the model writes in turn n, and all text."""
        before = self.messages[:n]
        try:
            prompt = self._rendered(before, add_generation_prompt=True)
            asked = self._rendered(before)
        except FolderError:
            if any(x["role"] in ("user", "tool") for x in before):
                raise
            return self._without_question(n, shown), shown
        history = os.path.commonprefix([prompt, asked])
        header = prompt[len(history) :]
        if shown.startswith(history):
            other = "" if header else self._header
            if other and shown.startswith(history + other):
                return history + other, shown
            # A prompt may begin another thought than the answer has.
            if not shown.startswith(prompt):
                prompt = history + header.partition("<think>")[0]
            return prompt, shown
        # The answer changes how the template renders earlier messages.
        at = shown.rfind(header) if header else -1
        if at < 0:
            raise FolderError(
                f"{self.where}: the chat template renders the messages before turn"
                f" {n + 1} differently once the assistant has answered."
            )
        return prompt, prompt + shown[at + len(header) :]

    def _without_question(self, n: int, shown: str) -> str:
        for length in range(len(self._header), 0, -1):
            if (at := shown.rfind(self._header[:length])) >= 0:
                return shown[: at + length]
        return shown[: max(shown.find(self.messages[n].get("content") or ""), 0)]

    @functools.cached_property
    def _header(self) -> str:
        """Text between a question and the model's answer."""
        asked = self._rendered([_USER])
        prompt = self._rendered([_USER], add_generation_prompt=True)
        return prompt[len(os.path.commonprefix([prompt, asked])) :]

    def _refuse_hidden(self, n: int, written: str) -> None:
        message = self.messages[n]
        for part in re.split("</?think>", message.get("content") or ""):
            if part.strip() not in written:
                raise FolderError(
                    f"{self.where}: the chat template leaves out what the assistant"
                    f" says in turn {n + 1}: {part.strip()[:60]!r}."
                )
        if (message.get("reasoning_content") or "").strip() not in written:
            print(
                f"{self.where}: the chat template leaves out the reasoning_content of"
                f" turn {n + 1}",
                file=sys.stderr,
            )

    def _rendered(self, messages: Sequence[Any], **how: bool) -> str:
        if not messages:
            raise FolderError(f"{self.where} begins with the assistant.")
        how = how if self.tools is None else {"tools": self.tools, **how}
        render = self.tokenizer.apply_chat_template
        try:
            return render(list(messages), tokenize=False, **how)
        except (TemplateError, TypeError, ValueError) as error:
            raise FolderError(
                f"{self.where}: the chat template says: {error}."
            ) from None

    def _tokens(self, text: str) -> list[int]:
        how = {"add_special_tokens": False, "verbose": False}
        return self.tokenizer(text, **how)["input_ids"]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return len(os.path.commonprefix([list(one), list(other)]))


def _is_message(x: Any) -> bool:
    known = isinstance(x, Mapping) and isinstance(x.get("role"), str)
    content = x.get("content") if known else None
    return known and (isinstance(content, str) or bool(x.get("tool_calls")))
