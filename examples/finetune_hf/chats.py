"""Chats in the folder's own template, and the tokens that the model writes in them."""

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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
        stop = len(tokens) - self._beyond(n, shown, tokens[start:])
        if next(self._visible(tokens[start:stop][::-1]), None) not in self._special:
            # GLM has no token of its own there, and stops as it writes the next role's.
            followed = self._followed(n, self.messages[n + 1 : n + 2] or [_USER])
            after = followed.removeprefix(shown) if followed.startswith(shown) else ""
            ending = self._special.intersection(self._tokens(after)[:1])
            tokens, stop = [*tokens[:stop], *ending], stop + len(ending)
        return tokens, start, stop

    @functools.cached_property
    def _special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {n for n, x in added if x.special} | {*self.tokenizer.all_special_ids}

    def _visible(self, tokens: Sequence[int]) -> Iterator[int]:
        return (x for x in tokens if not self.tokenizer.decode([x]).isspace())

    def _followed(self, n: int, after: Sequence[Any]) -> str:
        with contextlib.suppress(FolderError):
            return self._rendered([*self.messages[: n + 1], *after])
        return ""

    def _beyond(self, n: int, shown: str, written: Sequence[int]) -> int:
        """Counts the tokens that end the chat, after the one that ends turn n."""
        message, tokens = self.messages[n], self._tokens(shown)
        if not (followed := self._followed(n, [_USER])):
            return 0
        count = len(tokens) - common(self._tokens(followed), tokens)
        end = len(written) - count
        if end <= 0 or not (message.get("content") or message.get("tool_calls")):
            return 0
        ends = {next(self._visible(written[:end][::-1]), None)} - {None}
        ends.update(self._visible(written[end:]))
        return count if ends <= self._special else 0

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
        for call in message.get("tool_calls") or ():
            match call:
                case {"function": {"name": str(name)}} | {"name": str(name)}:
                    self._refuse_without(n, name, written)
        for name in ("reasoning_content", "reasoning", "thinking"):
            if str(message.get(name) or "").strip() not in written:
                what = f"the chat template leaves out the {name} of turn {n + 1}"
                print(f"{self.where}: {what}", file=sys.stderr)

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
