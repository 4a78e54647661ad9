"""What was found of a loss, as a table."""

import math
from collections.abc import Iterable

from jax.core import ShapedArray

from paged_optax.analysis.equation import Constant
from paged_optax.backend.sizes import readable_bytes
from paged_optax.backend.text_table import table
from paged_optax.splitting.pieces import Seen
from paged_optax.splitting.traced import Found, Loss


def described(loss: Loss, found: Found) -> str:
    """The table that `print(model)` shows."""
    pieces = found.pieces
    flat = pieces.flat
    kinds = [pieces.kind_of.count(k) for k in range(len(pieces.kinds))]
    rows = [("layers", found.name, f"{len(pieces.kind_of)}")]
    if len(kinds) > 1:
        order = "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[k % 26] for k in pieces.kind_of)
        rows.append(("kinds", order, f"{len(kinds)}"))
    own = [n for stack in found.stacks.values() for n in stack.leaves]
    rows.append(
        (
            "parameters of layers",
            f"{len(found.stacks)} stacks",
            _size(flat.avals[n] for n in own),
        )
    )
    others = set(range(len(loss.leaves))) - set(own)
    rows.append(
        (
            "other parameters",
            f"{len(others)} arrays",
            _size(flat.avals[n] for n in others),
        )
    )
    rows.append(
        ("carried, saved a layer", _types(pieces.carried), _size(pieces.carried))
    )
    seen = {
        role.value
        for kind in pieces.kinds
        for role in kind.roles
        if isinstance(role, Seen) and role.value not in flat.constants
    }
    shared = [flat.avals[x] for x in sorted(seen)]
    if shared:
        rows.append(("seen by all layers", _types(shared), _size(shared)))
    for n, each in enumerate(pieces.tables):
        operands = [each] if isinstance(each, (int, Constant)) else each
        avals = [flat.avals[x] for x in operands if isinstance(x, int)]
        text = _types(avals[:1]) or "numbers of the program"
        rows.append((f"table {n}, by layer", text, _size(avals)))
    if pieces.kept:
        rows.append(("kept, a layer", _types(pieces.kept), _size(pieces.kept)))
    made = (x for e in flat.equations for x in e.outputs if x not in pieces.inside)
    if values := list(made):
        largest = max(values, key=lambda x: _bytes(flat.avals[x]))
        rows.append(
            (
                "largest value outside",
                _types([flat.avals[largest]]),
                _size([flat.avals[largest]]),
            )
        )
    return table(("what", "found", "size"), rows)


def _bytes(aval: ShapedArray) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 8)


def _size(avals: Iterable[ShapedArray]) -> str:
    return readable_bytes(sum(map(_bytes, avals)))


def _types(avals: Iterable[ShapedArray]) -> str:
    texts = [f"{x.dtype}{list(x.shape)}" for x in avals]
    more = f", {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
