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
#: Roles by other names; templates may have more roles.
ROLES = {x: x for x in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}


@dataclasses.dataclass(frozen=True)
class Chat:
    """A chat, and the tokenizer whose template renders it."""

    where: str  # file and line, for messages
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]  # of the template
    tokenizer: Any
    known: int = 0  # messages of the prompt, which are not learned

    @classmethod
    def of(
        cls, where: str, messages: Any, record: Any, tokenizer: Any, known: int = 0
    ) -> "Chat":
        turns = [_message(f"{where}, turn {n}", x) for n, x in enumerate(messages, 1)]
        if not any(map(_is_learned, turns[known:])):
            raise FolderError(f"{where} has no assistant's turn to learn.")
        if tokenizer.chat_template is None:
            raise FolderError("the tokenizer has no chat template: give plain text.")
        text = lambda x: parsed(where, x or "null") if isinstance(x, str) else x
        names = "chat_template_kwargs", "tools"
        options, tools = (text(record.get(name)) for name in names)
        if not isinstance(options or {}, dict):
            raise FolderError(f"{where}: chat_template_kwargs={options!r}: no object.")
        options = (options or {}) | ({} if tools is None else {"tools": tools})
        return cls(where, turns, options, tokenizer, known)

    def turns(self) -> list[Turn]:
        """Returns documents in which the assistant's turns are learned."""
        found = list[Turn]()
        for n in reversed(range(self.known, len(self.messages))):
            if not _is_learned(self.messages[n]):
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
        for k, x in enumerate(self.messages[:n]):
            if x["role"] not in ("assistant", "tool"):
                self._refuse_without(k, x.get("content") or "", text)
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
            self._refuse_without(n, part, written)
        if (message.get("reasoning_content") or "").strip() not in written:
            print(
                f"{self.where}: the chat template leaves out the reasoning_content of"
                f" turn {n + 1}",
                file=sys.stderr,
            )

    def _refuse_without(self, n: int, part: str, text: str) -> None:
        if part.strip() not in text:
            raise FolderError(
                f"{self.where}: the chat template leaves out what the"
                f" {self.messages[n]['role']} says in turn {n + 1}:"
                f" {part.strip()[:60]!r}."
            )

    def _rendered(self, messages: Sequence[Any], **how: bool) -> str:
        if not messages:
            raise FolderError(f"{self.where} begins with the assistant.")
        render = self.tokenizer.apply_chat_template
        try:
            return render(list(messages), **self.options | how | {"tokenize": False})
        except (TemplateError, TypeError, ValueError) as error:
            why = f"{self.where}: the chat template says: {error}."
            raise FolderError(why) from None

    def _tokens(self, text: str) -> list[int]:
        how = {"add_special_tokens": False, "verbose": False}
        return self.tokenizer(text, **how)["input_ids"]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return len(os.path.commonprefix([list(one), list(other)]))


def _is_learned(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight") != 0


def _message(where: str, x: Any) -> dict[str, Any]:
    """Returns a message with its content as one text."""
    if not isinstance(x, Mapping) or not isinstance(role := x.get("role"), str):
        fields = f"only {', '.join(x)}" if isinstance(x, Mapping) else f"it is {x!r}"
        raise FolderError(f"{where} has no role and content, {fields}.")
    if (name := ROLES.get(role.lower(), role)) != role:
        raise FolderError(f"{where} has role={role!r}: rename it to {name!r}.")
    if role == "assistant" and x.get("weight") not in (None, 0, 1):
        raise FolderError(f"{where} has weight={x['weight']!r}: give 0 or 1.")
    content = x.get("content")
    if isinstance(content, list):
        kinds = [y.get("type") if isinstance(y, Mapping) else y for y in content]
        if others := [kind for kind in kinds if kind != "text"]:
            raise FolderError(f"{where}: only text is read, not type={others[0]!r}.")
        content = "".join(str(y.get("text") or "") for y in content)
    if not isinstance(content, str) and not (content is None and x.get("tool_calls")):
        raise FolderError(f"{where} has content={content!r:.60}: give a text.")
    return {**x} if content is None else {**x, "content": content}
