"""Table of a split loss."""

import re
from collections.abc import Iterable, Iterator, Sequence

from jax.core import ShapedArray

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import dtype_and_shape, readable_bytes, table
from paged_optax.splitting.dependence import (
    line_of,
    live_of,
    producers_of,
    values_in,
    values_of,
)
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.split_loss import Loss, SplitLoss

_LOGITS = (
    "The logits are the largest: po.linear_cross_entropy(x, head, labels) in the loss"
    " never materializes them."
)


def summary(loss: Loss, split: SplitLoss) -> str:
    """Returns the table of `print(model)`, with advice."""
    pieces, flat = split.pieces, split.pieces.flat
    count = len(pieces.kind_of)
    rows = [("layers", split.layers.shown, f"{count}")]
    if len(pieces.kinds) > 1:
        rows.append(("kinds", _kinds(pieces.kind_of), f"{len(pieces.kinds)}"))
    rows += _parameters(loss, split)
    carried = f"{count} x {_size(pieces.carried)}"
    rows.append(("carried, saved for each layer", _types(pieces.carried), carried))
    if shared := [flat.avals[x] for x in sorted(pieces.seen)]:
        rows.append(("seen by all layers", _types(shared), _size(shared)))
    rows += [("for each layer another", *_row(flat, each)) for each in pieces.tables]
    if pieces.kept:
        kept = f"{count} x {_size(pieces.kept)}"
        rows.append(("kept of each layer", _types(pieces.kept), kept))
    for other in split.others:
        frozen = all(loss.leaves[n][0] for n in other.leaves)
        whole = "frozen" if frozen else "with their gradients"
        words = f"{other.shown}, {other.length} layers, {whole}"
        rows.append(("held whole", words, readable_bytes(other.nbytes)))
    activation = _largest(pieces, len(loss.leaves))
    if activation is not None:
        equation, aval = activation
        place = re.split(r"[/\\]", line_of(equation).split(", which")[0])[-1]
        text = f"{_types([aval])} at {place}"
        rows.append(("largest activation outside", text, _size([aval])))
    lines = [table(("what", "found", "size"), rows)]
    if activation is not None and _are_logits(pieces, activation[1], len(loss.leaves)):
        lines.append(_LOGITS)
    for layers, error in split.refused:
        size = readable_bytes(layers.nbytes)
        lines.append(f"{layers.shown}, {size}, is not split: {error}")
    return "\n".join(lines)


def _parameters(loss: Loss, split: SplitLoss) -> Iterator[tuple[str, str, str]]:
    """Yields rows of the layers' parameters and of all others, trained and frozen."""
    avals, leaves = split.pieces.flat.avals, loss.leaves
    stacked = {n for stack in split.stacks.values() for n in stack.leaves}
    count = len(split.pieces.kind_of)
    for frozen in (False, True):
        word = "frozen" if frozen else "parameters"
        stacks = [
            x for (is_frozen, _), x in split.stacks.items() if is_frozen == frozen
        ]
        if stacks:
            size = nbytes([avals[n] for stack in stacks for n in stack.leaves])
            each = f"{count} x {readable_bytes(size // count)}"
            yield f"{word}, of each layer", f"{len(stacks)} arrays", each
        rest = [n for n, (is_frozen, _) in enumerate(leaves) if is_frozen == frozen]
        rest = [n for n in rest if n not in stacked]
        if rest:
            names = ["/".join(leaves[n][1]) for n in rest]
            size = _size(avals[n] for n in rest)
            yield f"{word}, of no layer", _some(names, 3), size


def _kinds(kind_of: Sequence[int]) -> str:
    """A letter for each layer's kind, with a repeated pattern shown once."""
    first = {kind: k for k, kind in enumerate(dict.fromkeys(kind_of))}
    order = "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[first[k] % 26] for k in kind_of)
    # The shortest repeated pattern, for example of alternating layers.
    for period in range(1, len(order) // 2 + 1):
        if all(x == y for x, y in zip(order, order[period:], strict=False)):
            return f"{order[:period]}, repeated"
    return order if len(order) <= 40 else f"{order[:37]}..."


def _row(flat: Flat, table: Sequence[Operand | None] | Operand) -> tuple[str, str]:
    """The type of a table's rows, and the bytes of all rows."""
    operands = [table] if isinstance(table, (int, Constant)) else table
    avals = [flat.avals[x] for x in operands if isinstance(x, int)]
    if not avals:
        return "a number of the program", "0 B"
    return _types(avals[:1]), _size(avals)


def _largest(pieces: Pieces, parameters: int) -> tuple[Equation, ShapedArray] | None:
    """The largest value outside the layers that depends on the batch."""
    flat = pieces.flat
    live = live_of(flat, producers_of(flat))
    # XLA removes equations that the results do not need.
    needed = set(values_of(flat.outputs))
    needed.update(*(values_in(flat.equations[n]) for n in live))
    best = None
    for equation, _ in _of_the_batch(flat, parameters):
        for x in equation.outputs:
            aval = flat.avals[x]
            larger = best is None or nbytes(aval) > nbytes(best[1])
            if x in needed and x not in pieces.inside and larger:
                best = equation, aval
    return best


def _of_the_batch(flat: Flat, parameters: int) -> Iterator[tuple[Equation, set[int]]]:
    """Yields equations that depend on the batch, with operands that do not."""
    fixed = {*range(parameters), *flat.constants}
    for equation in flat.equations:
        from_parameters = fixed.intersection(values_in(equation))
        if len(from_parameters) == len(set(values_in(equation))):
            fixed.update(equation.outputs)
        else:
            yield equation, from_parameters


def _are_logits(pieces: Pieces, aval: ShapedArray, parameters: int) -> bool:
    """True if a product with parameters, and its softmax, have this shape."""
    # Values computed from logits, such as exponentials, have the same size.
    flat, shape = pieces.flat, sorted(aval.shape)
    product, softmax = False, False
    for e, from_parameters in _of_the_batch(flat, parameters):
        if all(x not in pieces.inside for x in e.outputs):
            large = any(sorted(flat.avals[x].shape) == shape for x in e.outputs)
            name = e.primitive.name
            product |= large and name == "dot_general" and bool(from_parameters)
            softmax |= large and name == "exp"
    return product and softmax


def _size(avals: Iterable[ShapedArray]) -> str:
    return readable_bytes(nbytes(list(avals)))


def _types(avals: Iterable[ShapedArray]) -> str:
    return _some(list(map(dtype_and_shape, avals)), 3)


def _some(texts: Sequence[str], most: int) -> str:
    more = f", {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
