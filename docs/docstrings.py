"""Griffe extension: reStructuredText in docstrings becomes Markdown."""

import re
import textwrap
from typing import Any

from griffe import Extension, Object


def markdown(text: str) -> str:
    """Translates sections of examples, math directives, inline math and links.

    Args:
      text: A docstring.

    Returns:
      The docstring with `$$` and `$` around math, and Markdown links.
    """
    block = lambda match: (
        f"{match[1]}$$\n{textwrap.indent(textwrap.dedent(match[2]).strip(), match[1])}"
        f"\n{match[1]}$$\n"
    )
    text = re.sub(
        r"^( *)\.\. math::\n((?:\1 +.*\n|\n)+)", block, text + "\n", flags=re.M
    )
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    return re.sub(r"`([^`<]+?)\s*<(https?://[^>]+)>`_+", r"[\1](\2)", text).rstrip()


class Docstrings(Extension):
    """Translates the docstring of every object."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Translates one docstring."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
