"""`split_layers`: a user's loss as prologue, layer and epilogue."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import jax
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.backend.text import keystr
from paged_optax.backend.types import shape_dtype
from paged_optax.backend.validation import (
    check_arrays,
    check_function,
    nondifferentiable,
)
from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.splitting.functions import Functions
from paged_optax.splitting.numbered import Member, split_names
from paged_optax.splitting.split_loss import Loss, SplitLoss
from paged_optax.splitting.stacking import Stack, Stacking, tell_of_choices, unnested
from paged_optax.splitting.summary import summary


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
      batch: A batch, or its shapes; with `accumulate=True` a micro-batch. For batches
        of other shapes the loss is traced again.
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
    frozen_shapes = None if frozen is None else jax.tree.map(shape_dtype, frozen)
    traced = Loss(loss, jax.tree.map(shape_dtype, params), frozen_shapes)
    split = traced.split(batch, layers, None)
    functions = _FunctionsByShape(
        traced, split, {_key(batch): Functions.of(split.pieces)}
    )
    return SplitModel(
        functions.prologue, functions.layer, functions.epilogue, functions
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _FunctionsByShape:
    """Prologue, layer and epilogue for batches of any shapes.

    Attributes:
      loss: The user's loss.
      split: The loss, split for the first batch.
      by_shapes: A cache of the functions by the batch's shapes. They depend only on the
        loss and these shapes.
    """

    loss: Loss
    split: SplitLoss
    by_shapes: dict[Hashable, Functions]

    def stacking(self, *, frozen: bool) -> Stacking:
        """How the trained parameters are stacked, or the frozen ones."""
        loss = self.loss
        tree = loss.frozen if frozen else loss.params
        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        first = len(jax.tree.leaves(loss.params)) if frozen else 0
        stacks = {
            names: Stack(tuple(n - first for n in stack.leaves), stack.axis)
            for (kind, names), stack in self.split.stacks.items()
            if kind == frozen
        }
        taken = {n for stack in stacks.values() for n in stack.leaves}
        paths = tuple(path for path, _ in flat)
        names = enumerate(split_names(paths))
        rest = {name: n for n, name in names if n not in taken}
        return Stacking(
            "frozen" if frozen else "params",
            structure,
            paths,
            tuple(x.shape for _, x in flat),
            stacks,
            rest,
        )

    def prologue(self, rest: PyTree, *others: PyTree) -> tuple[list[Array], PyTree]:
        """The first layer's input, and the values that all layers see."""
        functions = self._of(others[-1])
        x, context = functions.prologue(self._numbered(rest, others))
        # A layer is not given the batch, by whose shapes its functions are chosen.
        return x, (functions, context)

    def layer(
        self, weights: PyTree, *others: PyTree
    ) -> tuple[list[Array], list[Array]]:
        """The next layer's input, and the values to keep for the epilogue."""
        *frozen, x, (functions, context), i = others
        trees = weights, *frozen

        def weight(member: Member) -> Array:
            kind, names = member
            (leaf,) = unnested(trees[kind], [names])
            return leaf

        return functions.layer(weight, x, context, i)

    def epilogue(self, rest: PyTree, *others: PyTree) -> PyTree:
        """What the loss returns."""
        *frozen, x, kept, batch = others
        numbers = self._numbered(rest, (*frozen, batch))
        results = self._of(batch).epilogue(numbers, x, kept)
        return jax.tree.unflatten(self.split.output, results)

    def _of(self, batch: PyTree) -> Functions:
        key = _key(batch)
        if key not in self.by_shapes:
            # The layers are those of the first batch: its parameters are stacked so.
            stacked = isinstance(next(iter(self.split.stacks.values())).axis, int)
            split = self.loss.split(batch, self.split.layers.name, stacked)
            self.by_shapes[key] = Functions.of(split.pieces)
        return self.by_shapes[key]

    def _numbered(self, rest: PyTree, others: Sequence[PyTree]) -> dict[int, ArrayLike]:
        """The parameters outside the layers, and the batch, by number."""
        *frozen, batch = others
        if bool(frozen) != (self.loss.frozen is not None):
            raise TypeError(
                "frozen is given, and split_layers was given none: split the loss"
                " again, split_layers(loss, params, batch, frozen=frozen)."
                if frozen
                else "frozen is missing: the loss has parameters that are not trained."
                " Pass model.stack_frozen(frozen) after the batch to a step, and before"
                " it to model.loss."
            )
        numbers: dict[int, ArrayLike] = {}
        first = 0
        for tree, is_frozen in ((rest, False), *((x, True) for x in frozen)):
            stacking = self.stacking(frozen=is_frozen)
            leaves = unnested(tree, [("rest", *names) for names in stacking.rest])
            places = (first + n for n in stacking.rest.values())
            numbers.update(zip(places, leaves, strict=True))
            first += len(stacking.paths)
        numbers.update(enumerate(jax.tree.leaves(batch), first))
        return numbers


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SplitModel(LayerwiseModel):
    """A loss that is taken apart; what `split_layers` returns."""

    _functions: _FunctionsByShape

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
        return summary(self._functions.loss, self._functions.split)


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
        raise TypeError(
            f"params{keystr(path)} has dtype {x.dtype} and no gradient: pass it in"
            " frozen=, to loss(params, frozen, batch), or with the batch."
        )


def _key(batch: PyTree) -> Hashable:
    """The structure and the types of a batch."""
    leaves, structure = jax.tree.flatten(batch)
    types = [jax.typeof(x) if not hasattr(x, "dtype") else x for x in leaves]
    return structure, tuple((tuple(x.shape), str(x.dtype)) for x in types)
