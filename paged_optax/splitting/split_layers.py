"""`split_layers`: a user's loss as prologue, layer and epilogue; its table."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.core import ShapedArray
from jaxtyping import PyTree

from paged_optax.analysis.flat import Flat
from paged_optax.analysis.program import Constant, Equation, Operand
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import dtype_and_shape, keystr, readable_bytes, table
from paged_optax.backend.types import shape_dtype
from paged_optax.backend.validation import (
    check_arrays,
    check_function,
    nondifferentiable,
)
from paged_optax.layerwise.forward import ModelFunctions
from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.layerwise.parameters import Partition
from paged_optax.layerwise.weights import Frozen
from paged_optax.splitting.dependence import (
    line_of,
    live_of,
    producers_of,
    values_in,
    values_of,
)
from paged_optax.splitting.functions import SplitFunctions
from paged_optax.splitting.pieces import Pieces
from paged_optax.splitting.split_loss import RESEED, Loss, SplitLoss
from paged_optax.splitting.stacking import tell_of_choices


def split_layers(
    loss: Callable[..., PyTree],
    params: PyTree,
    batch: PyTree,
    *,
    layers: str | None = None,
    frozen: PyTree | None = None,
) -> "SplitModel":
    r"""Takes an ordinary loss apart, to train the model layer by layer.

    The loss is traced, and nobody rewrites the model. Its equations are cut between one
    layer's parameters and the next one's, where the fewest bytes are alive:

    .. math::
        x_0, c = \mathrm{prologue}(\theta, b), \quad
        x_{i+1} = \mathrm{layer}(\theta_i, x_i, c, i), \quad
        \mathrm{loss} = \mathrm{epilogue}(\theta, x_L, b).

    Layers are subtrees of the parameters that are numbered and alike (a list of
    modules, Linen's `Block_0`, Haiku's `h_0`, flat names such as `"layers.0.up"`);
    lists by kind, such as `params["mlp"][n]`; or stacked parameters that a
    `jax.lax.scan` goes over (`nn.scan`, `nnx.scan`), or that a loop of Python indexes
    by the layers' numbers (`stack[n]`). Layers of several kinds become the branches of
    a `jax.lax.switch`. What differs between layers of one kind (literals, keys, masks)
    is looked up in a table. The first or last ones that are unlike stay outside.
    `print(model)` is a table of what was found.

    A `jax.checkpoint` around a whole layer is left out: the step computes each layer
    again anyway. Those within a layer stay.

    Args:
      loss: `loss(params, batch)`, or `loss(params, frozen, batch)`, as for `jax.grad`.
        It returns the loss, or the loss and metrics; the loss is a number or a
        `WeightedLoss`.
      params: The parameters, or their `jax.ShapeDtypeStruct`s.
      batch: A batch, or its shapes; with `accumulate=True` a micro-batch. For other
        shapes and dtypes, and parameters of others, it is traced again, as by `jit`.
      layers: The path or prefix of the layers, such as `"layers"` or `"model/h_*"`;
        None: the largest ones that are found.
      frozen: Parameters that are not trained, or their shapes.

    Returns:
      The model: what `layerwise_step` takes, and `stack`, `unstack` and `workspace`.

    Raises:
      ValueError: If no layers are found, or if they are not computed one after the
        other. The message names the line of the model, and the way out.
      TypeError: If `loss` cannot be called so, or if a parameter has no gradient.

    Example:
      >>> import jax, jax.numpy as jnp, optax, paged_optax as po
      >>> def loss(params, batch):
      ...     x = params["embed"][batch]
      ...     for layer in params["layers"]:
      ...         x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
      ...     logits = x[:-1] @ params["embed"].T
      ...     labels = batch[1:]
      ...     losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      ...     return losses.mean()
      >>> layer = {"up": jnp.ones((64, 128)) / 64, "down": jnp.ones((128, 64)) / 128}
      >>> params = {"embed": jnp.eye(32, 64), "layers": [layer] * 3}
      >>> model = po.split_layers(loss, params, jnp.arange(16))
      >>> params = model.stack(params)
      >>> tx = po.paged_adamw(1e-3)
      >>> args = params, tx.init(params), model.workspace(params), jnp.arange(16)
      >>> step = po.jit_step(po.layerwise_step(model, tx), *args)
      >>> params, state, workspace, output = step(*args)
      >>> params["layers"]["up"].shape, len(model.unstack(params)["layers"])
      ((3, 64, 128), 3)
    """
    check_function("loss", loss)
    check_arrays("params", params)
    _refuse_arguments(loss, frozen)
    _refuse_integers(params)
    if layers is not None and not isinstance(layers, str):
        raise TypeError(f"layers={layers!r} is not a path: pass one, as 'layers'.")
    # Types are kept, and no arrays: for other types the loss is traced again.
    params, frozen = jax.tree.map(shape_dtype, (params, frozen))
    # A function of its own: what `loss` reads besides its arguments may have changed.
    function = jax.jit(lambda *arguments: loss(*arguments))
    functions = SplitFunctions.of(Loss(function, layers, params, frozen), batch)
    return SplitModel(
        functions.prologue, functions.layer, functions.epilogue, functions
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SplitModel(LayerwiseModel):
    """A loss that is taken apart; what `split_layers` returns."""

    _functions: SplitFunctions

    def stack(
        self,
        params: PyTree,
        *,
        on_host: bool | Literal["all"] = False,
        min_size: int | str = "256KiB",
    ) -> dict[str, PyTree]:
        """The parameters with those of the layers stacked, leaf by leaf.

        What is outside the layers is not copied: a step that donates what it is given
        deletes these arrays of `params` too.

        Args:
          params: The parameters, as the loss takes them, or their shapes. NumPy arrays
            go to the host without a detour, a stack at a time; so does what NumPy makes
            an array of (`shape`, `dtype` and `__array__`), which is read only then.
          on_host: Whether the layers' parameters go to host memory; see `offload`.
            `"all"`: the others too, such as embeddings. They are then fetched for the
            prologue, the epilogue and their update, and their gradients wait on the
            host in between.
          min_size: Leaves of fewer bytes, those of layers of fewer a layer, stay on the
            device; so do a layer's vectors.

        Returns:
          `{"layers": ..., "rest": ...}`: nested dicts of the paths' names. Each leaf of
          the layers has a leading axis for them.

        Raises:
          ValueError: If the tree is not the one that was split.
        """
        stacking = self._functions.stacking(frozen=False)
        return stacking.stacked(params, on_host=on_host, min_size=min_size)

    def stack_frozen(
        self,
        frozen: PyTree,
        *,
        on_host: bool | Literal["all"] = False,
        min_size: int | str = "256KiB",
    ) -> dict[str, PyTree]:
        """The frozen parameters, stacked as `stack` does: a step takes them last.

        Args:
          frozen: The frozen parameters, as the loss takes them, or their shapes.
          on_host: As for `stack`.
          min_size: As for `stack`.

        Returns:
          As of `stack`.

        Raises:
          ValueError: If the tree is not the one that was split.
        """
        stacking = self._functions.stacking(frozen=True)
        return stacking.stacked(frozen, on_host=on_host, min_size=min_size)

    def functions(
        self, params: Partition, frozen: Frozen | None, activations_on_host: bool
    ) -> ModelFunctions:
        """As for `LayerwiseModel`; the loss is traced again for types that are new."""
        whole = lambda x: x and {**x.rest, "layers": x.layers}
        x = self._functions.given(whole(params), whole(frozen))
        calls = x.prologue, x.layer, x.epilogue
        return ModelFunctions(*calls, activations_on_host, frozen)

    def check(self, tx: optax.GradientTransformation) -> None:
        """Tells of what `tx` chooses otherwise for a stack than for one layer.

        A mask or label that is computed from shapes (`x.ndim > 1`) does, as a stack has
        one axis more: a warning. So does Muon, which is made for matrices, and what
        takes norms: an error. Parameters that the loss has stacked are what Optax is
        given, too. `layerwise_step` calls it.

        Args:
          tx: The transformation.

        Raises:
          ValueError: If the update of a layer, or of a stack that is updated whole, is
            not element by element.
        """
        stacks = self._functions.stacking(frozen=False).layers.values()
        if any(stack.axis is None for stack in stacks):
            tell_of_choices(tx, self.stack(self._functions.loss.params))

    def unstack(self, params: PyTree) -> PyTree:
        """The parameters as the loss takes them.

        Args:
          params: What `stack` returned, or a step.

        Returns:
          The tree. What was on the host is there.
        """
        return self._functions.stacking(frozen=False).unstacked(params)

    def __repr__(self) -> str:
        split = self._functions.split
        return f"SplitModel({split.layers.name!r}, {len(split.pieces.kind_of)} layers)"

    def __str__(self) -> str:
        return _summary(self._functions.loss, self._functions.split)


def _refuse_arguments(loss: Callable[..., PyTree], frozen: PyTree | None) -> None:
    """Refuses a loss that cannot be called with these trees of parameters."""
    names = ("params", "batch") if frozen is None else ("params", "frozen", "batch")
    try:
        inspect.signature(loss).bind(*names)
    except TypeError as error:
        call, way_out = ", ".join(names), "takes parameters that are not trained"
        raise TypeError(
            f"loss is called as loss({call}), and that fails: {error}. If it {way_out},"
            " it is loss(params, frozen, batch), and split_layers is given frozen=."
        ) from None
    except ValueError:
        pass  # a function that does not say what it takes


def _refuse_integers(params: PyTree) -> None:
    """Refuses parameters that have no gradient."""
    for path, x in nondifferentiable(params):
        random = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == jnp.uint32
        raise TypeError(
            f"params{keystr(path)} has dtype {x.dtype} and no gradient: pass it in"
            " frozen=, to loss(params, frozen, batch), or with the batch."
            + random
            * f" Frozen, a count or key is the same in each step. {RESEED}"
        )


_LOGITS = (
    "The logits are the largest: po.linear_cross_entropy(x, head, labels) in the loss"
    " never holds them."
)


def _summary(loss: Loss, split: SplitLoss) -> str:
    """The table of `print(model)`, and advice."""
    pieces, flat = split.pieces, split.pieces.flat
    count = len(pieces.kind_of)
    rows = [("layers", split.layers.shown, f"{count}")]
    if len(pieces.kinds) > 1:
        rows.append(("kinds", _order(pieces.kind_of), f"{len(pieces.kinds)}"))
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
        lines.append(f"{layers.shown}, {size}, is not taken apart: {error}")
    return "\n".join(lines)


def _parameters(loss: Loss, split: SplitLoss) -> Iterator[tuple[str, str, str]]:
    """Rows of the layers' parameters and of all others, trained and frozen."""
    avals, leaves = split.pieces.flat.avals, loss.leaves
    taken = {n for stack in split.stacks.values() for n in stack.leaves}
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
        rest = [n for n in rest if n not in taken]
        if rest:
            names = ["/".join(leaves[n][1]) for n in rest]
            size = _size(avals[n] for n in rest)
            yield f"{word}, of no layer", _some(names, 3), size


def _order(kind_of: Sequence[int]) -> str:
    """A letter for each layer's kind; a pattern that repeats is shown once."""
    first = {kind: k for k, kind in enumerate(dict.fromkeys(kind_of))}
    order = "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[first[k] % 26] for k in kind_of)
    # The shortest pattern that repeats, such as of layers that alternate.
    for period in range(1, len(order) // 2 + 1):
        if all(x == y for x, y in zip(order, order[period:], strict=False)):
            return f"{order[:period]}, repeated"
    return order if len(order) <= 40 else f"{order[:37]}..."


def _row(flat: Flat, table: Sequence[Operand | None] | Operand) -> tuple[str, str]:
    """The type of an argument that differs between layers, and the bytes of all."""
    operands = [table] if isinstance(table, (int, Constant)) else table
    avals = [flat.avals[x] for x in operands if isinstance(x, int)]
    if not avals:
        return "a number of the program", "0 B"
    return _types(avals[:1]), _size(avals)


def _largest(pieces: Pieces, parameters: int) -> tuple[Equation, ShapedArray] | None:
    """The largest value outside the layers that follows from the batch."""
    flat = pieces.flat
    live = live_of(flat, producers_of(flat))
    # Only what the results need is ever held.
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
    """Equations that follow from the batch, and their operands that do not."""
    fixed = {*range(parameters), *flat.constants}
    for equation in flat.equations:
        from_parameters = fixed.intersection(values_in(equation))
        if len(from_parameters) == len(set(values_in(equation))):
            fixed.update(equation.outputs)
        else:
            yield equation, from_parameters


def _are_logits(pieces: Pieces, aval: ShapedArray, parameters: int) -> bool:
    """Whether a product with parameters, and its softmax, have this shape."""
    # Values computed from logits, such as their exponentials, are as large as these.
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
