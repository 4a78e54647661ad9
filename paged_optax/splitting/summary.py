"""Table of a split loss."""

import re
from collections.abc import Iterable, Iterator, Sequence

from jax.core import ShapedArray

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Equation, Operand
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import dtype_and_shape, readable_bytes, table
from paged_optax.splitting.dependence import source_line
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.split_loss import Loss, SplitLoss


def summary(loss: Loss, split: SplitLoss) -> str:
    """Returns the table of `print(model)`, with advice."""
    pieces, flat = split.pieces, split.pieces.flat
    count = len(pieces.kind_indices)
    rows = [("layers", split.layers.shown, f"{count}")]
    if len(pieces.kinds) > 1:
        rows.append(("kinds", _kinds(pieces.kind_indices), f"{len(pieces.kinds)}"))
    rows += _parameters(loss, split)
    carried = f"{count} x {_size(pieces.carried)}"
    rows.append(("carried, saved for each layer", _types(pieces.carried), carried))
    if shared := [flat.avals[x] for x in sorted(pieces.seen)]:
        rows.append(("seen by all layers", _types(shared), _size(shared)))
    rows += [("for each layer another", *_row(flat, item)) for item in pieces.tables]
    if pieces.kept:
        kept = f"{count} x {_size(pieces.kept)}"
        rows.append(("kept of each layer", _types(pieces.kept), kept))
    for other in split.remaining:
        frozen = all(loss.leaves[n][0] for n in other.leaves)
        how = "frozen" if frozen else "with their gradients"
        words = f"{other.shown}, {other.length} layers, {how}"
        rows.append(("held whole", words, readable_bytes(other.nbytes(flat.avals))))
    if values := _activations(pieces, len(loss.leaves)):
        n = max(range(len(values)), key=lambda n: nbytes(flat.avals[values[n][1]]))
        eqn, x = values[n]
        line = source_line(eqn, (e for e, _ in values[n::-1]))
        place = re.split(r"[/\\]", line.split(", which")[0])[-1]
        text = f"{_types([flat.avals[x]])} at {place}"
        rows.append(("largest activation outside", text, _size([flat.avals[x]])))
    hints: list[str] = []
    for layers, error in split.refused:
        size = readable_bytes(layers.nbytes(flat.avals))
        hints.append(f"{layers.shown}, {size}, is not split: {error}")
    return "\n".join([table(("what", "found", "size"), rows), *hints])


def _parameters(loss: Loss, split: SplitLoss) -> Iterator[tuple[str, str, str]]:
    """Yields rows of the layers' parameters and of all others, trained and frozen."""
    avals, count = split.pieces.flat.avals, len(split.pieces.kind_indices)
    stacked = split.layers.leaves
    for frozen in (False, True):
        word = "frozen" if frozen else "parameters"
        stacks = [x for (part, _), x in split.layers.stacks.items() if part == frozen]
        if stacks:
            size = nbytes([avals[n] for stack in stacks for n in stack.leaves])
            text = f"{count} x {readable_bytes(size // count)}"
            yield f"{word}, of each layer", f"{len(stacks)} arrays", text
        rest = {
            n: "/".join(names)
            for n, (part, names) in enumerate(loss.leaves)
            if part == frozen and n not in stacked
        }
        if rest:
            size = _size([avals[n] for n in rest])
            yield f"{word}, of no layer", _some([*rest.values()], 3), size


def _kinds(kind_indices: Sequence[int]) -> str:
    """A letter for each layer's kind, with a repeated pattern shown once."""
    first = {kind: k for k, kind in enumerate(dict.fromkeys(kind_indices))}
    order = "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[first[k] % 26] for k in kind_indices)
    # The shortest repeated pattern, for example of alternating layers.
    for period in range(1, len(order) // 2 + 1):
        if all(x == y for x, y in zip(order, order[period:], strict=False)):
            return f"{order[:period]}, repeated"
    return order if len(order) <= 40 else f"{order[:37]}..."


def _row(flat: Flat, table: Sequence[Operand | None]) -> tuple[str, str]:
    """The type of a table's rows, and the bytes of all rows."""
    avals = [flat.avals[x] for x in table if isinstance(x, int)]
    return (_types(avals[:1]) or "a number of the program"), _size(avals)


def _activations(pieces: Pieces, parameters: int) -> list[tuple[Equation, int]]:
    """Values outside the layers that depend on the batch."""
    flat = pieces.flat
    fixed = {*range(parameters), *flat.constants}
    values: list[tuple[Equation, int]] = []
    # XLA removes equations that the results do not need.
    for n in flat.needed(flat.outputs):
        eqn = flat.eqns[n]
        if fixed.issuperset(eqn.numbers):
            fixed.update(eqn.outputs)
        else:
            values += [(eqn, x) for x in eqn.outputs if x not in pieces.inside]
    return values


def _size(avals: Iterable[ShapedArray]) -> str:
    return readable_bytes(nbytes(list(avals)))


def _types(avals: Iterable[ShapedArray]) -> str:
    return _some(list(map(dtype_and_shape, avals)), 3)


def _some(texts: Sequence[str], maximum: int) -> str:
    more = f", {len(texts) - maximum} more" if len(texts) > maximum else ""
    return ", ".join(texts[:maximum]) + more
