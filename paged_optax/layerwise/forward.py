"""The model's three functions, their mesh axes, and the epilogue's gradients.

A step runs on automatic axes: XLA divides its buffers, and the trace of a
transformation has no axes. The model's functions run on automatic axes too if they can.
Functions that use `out_sharding=` or `jax.sharding.reshard` cannot; each call of them
runs on the explicit axes, whose types state how arrays are divided.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.text import dtype_and_shape
from paged_optax.backend.types import is_explicit, with_automatic_axes
from paged_optax.layerwise.clipping import sum_dtype
from paged_optax.layerwise.loss import WeightedLoss, loss_and_metrics, over
from paged_optax.layerwise.parameters import Partition, stack_length
from paged_optax.layerwise.slices import (
    Dependency,
    LayerIndex,
    fetch_after,
    host_like,
    on_device,
)
from paged_optax.transform.context import current, known_shardings, sharding_in_type

#: The parameters without the layers', by name.
Rest = Mapping[Hashable, PyTree]

#: Replaces a tree's chosen leaves.
Merge = Callable[[Sequence[Array]], PyTree]


@dataclasses.dataclass(frozen=True)
class ModelFunctions:
    """The model's three functions.

    Attributes:
      activations_on_host: If true, the layers' inputs are in host memory.
      frozen: The frozen parameters. If None, the functions do not take any.
      saves: If true, the forward pass saves each layer's residuals beside its input.
    """

    prologue: Callable[..., PyTree]
    layer: Callable[..., PyTree]
    epilogue: Callable[..., PyTree]
    activations_on_host: bool
    frozen: Partition | None = None
    saves: bool = False

    def _all(self, rest: Rest) -> tuple[Rest, ...]:
        """The prologue's and epilogue's parameters, on the device."""
        every = (rest,) if self.frozen is None else (rest, self.frozen.rest)
        return jax.tree.map(on_device, every)

    def fetch_rest(
        self, rest: Rest, dependency: Dependency
    ) -> tuple["ModelFunctions", Rest, Dependency]:
        """Fetches parameters outside the layers after `dependency` is computed."""
        if self.frozen is None:
            return self, *fetch_after(rest, dependency)
        both = rest, self.frozen.rest
        (rest, fixed), dependency = fetch_after(both, dependency)
        frozen = dataclasses.replace(self.frozen, rest=fixed)
        return dataclasses.replace(self, frozen=frozen), rest, dependency

    def run_prologue(self, rest: Rest, batch: PyTree) -> tuple[PyTree[Array], PyTree]:
        """Returns the first layer's input, and the context."""
        x, context = self.prologue(*self._all(rest), batch)
        return jax.tree.map(jnp.asarray, x), context

    def run_layer(
        self,
        weights: PyTree[Array],
        frozen: PyTree[Array],
        x: PyTree,
        context: PyTree,
        i: LayerIndex,
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Returns one layer's output, and its kept outputs."""
        every = (weights,) if self.frozen is None else (weights, frozen)
        output, kept = self.layer(*every, x, context, i)
        return jax.tree.map(jnp.asarray, (output, kept))

    def run_epilogue(
        self, rest: Rest, x: PyTree[Array], kept: PyTree[Array], batch: PyTree
    ) -> PyTree:
        """Returns the loss, or the loss and metrics."""
        return self.epilogue(*self._all(rest), x, kept, batch)


class EpilogueGradients(NamedTuple):
    """A loss, its metrics, and its gradients by floating-point leaves.

    They are gradients by the parameters outside the layers, by the last layer's output,
    and by the kept outputs.
    """

    loss: Float[Array, ""] | WeightedLoss
    metrics: PyTree
    by_rest: Rest
    by_output: list[Array]
    by_kept: list[Array]


def pull_epilogue(
    model: ModelFunctions,
    rest: Rest,
    dtype: DTypeLike,
    x: PyTree[Array],
    kept: PyTree[Array],
    batch: PyTree,
    before: Float[Array, ""] | None = None,
    last: Bool[Array, ""] | bool = True,
) -> EpilogueGradients:
    """Computes the loss of one micro-batch, its metrics, and its gradients.

    The loss's weight has dtype `dtype`. The gradients are divided by the weight of
    this and the preceding micro-batches, `before`, or by nothing if that is None.
    """
    inputs, merge_x = select_inexact(x)
    floats, merge_kept = select_inexact(kept)

    def loss(
        rest: Rest, inputs: list[Array], floats: list[Array]
    ) -> tuple[ArrayLike, tuple[WeightedLoss | None, PyTree]]:
        output = model.run_epilogue(rest, merge_x(inputs), merge_kept(floats), batch)
        value, metrics = loss_and_metrics(output)
        if not isinstance(value, WeightedLoss):
            return value, (None, metrics)
        total, weight = map(jnp.asarray, value)
        weight = lax.stop_gradient(weight).astype(dtype)  # it is data
        value = total if before is None else over(total, before + weight, last)
        return value, (WeightedLoss(total, weight), metrics)

    (value, (weighted, metrics)), grads = jax.value_and_grad(
        loss, argnums=(0, 1, 2), has_aux=True
    )(rest, inputs, floats)
    return EpilogueGradients(weighted or value, metrics, *grads)


def pull_epilogues(
    pull: Callable[..., EpilogueGradients],
    rest: Rest,
    x: PyTree[Array],
    kept: PyTree[Array],
    batch: PyTree,
) -> EpilogueGradients:
    """The losses of all micro-batches, and the gradients of their mean."""
    count = len(jax.tree.leaves(batch)[0])

    def epilogue(
        total: Rest, args: tuple[PyTree, PyTree, PyTree]
    ) -> tuple[Rest, EpilogueGradients]:
        one = pull(*args)
        divisor = 1 if isinstance(one.loss, WeightedLoss) else count
        mean = lambda tree: jax.tree.map(lambda g: g / divisor, tree)
        total = jax.tree.map(
            lambda s, g: s + g.astype(s.dtype) / divisor, total, one.by_rest
        )
        by = mean(one.by_output), mean(one.by_kept)
        return total, EpilogueGradients(one.loss, one.metrics, {}, *by)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), rest)
    swapped = lambda tree: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
    total, every = lax.scan(epilogue, zeros, (x, swapped(kept), batch))
    every = every._replace(by_rest=total, by_kept=swapped(every.by_kept))
    if not isinstance(every.loss, WeightedLoss):
        return every
    weight = jnp.sum(every.loss.weight)
    mean = lambda tree: jax.tree.map(lambda g: over(g, weight).astype(g.dtype), tree)
    return EpilogueGradients(*every[:2], *map(mean, every[2:]))


def give_up_rest(
    epilogue: EpilogueGradients, stacks: list[Array], rest: Rest, reads: PyTree[bool]
) -> tuple[EpilogueGradients, list[Array]]:
    """Moves the epilogue's gradients to the host, where their parameters are.

    The barrier puts the backward pass after the epilogue, so that the fetched
    parameters are freed first. `reads` has the parameters that the epilogue reads; the
    gradients by the others are zeros, and are computed where they are added.
    """
    reading = jax.tree.leaves(reads)
    known, merge = select(epilogue.by_rest, reading)
    known = host_like(known, select(rest, reading)[0])
    known, by_output, by_kept, stacks = lax.optimization_barrier(
        (known, epilogue.by_output, epilogue.by_kept, stacks)
    )
    by = merge(known), by_output, by_kept
    return EpilogueGradients(*epilogue[:2], *by), stacks


def is_inexact(x: object) -> bool:
    """True if a leaf is an array that can have a gradient."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def select_inexact(tree: PyTree) -> tuple[list[Array], Merge]:
    """Selects the floating-point leaves of a tree."""
    return select(tree, [is_inexact(x) for x in jax.tree.leaves(tree)])


def select(tree: PyTree, subset: Sequence[bool]) -> tuple[list[Array], Merge]:
    """Returns the chosen leaves of a tree, and a function that replaces them."""
    leaves, structure = jax.tree.flatten(tree)

    def merge(values: Sequence[Array]) -> PyTree:
        new = iter(values)
        return jax.tree.unflatten(
            structure,
            [next(new) if flag else x for x, flag in zip(leaves, subset, strict=True)],
        )

    return [x for x, flag in zip(leaves, subset, strict=True) if flag], merge


def check_same_input(
    x: PyTree[Array], output: PyTree[Array] | PyTree[jax.ShapeDtypeStruct]
) -> None:
    """Raises if a layer's output cannot be the next layer's input."""
    describe = lambda tree: jax.tree.map(dtype_and_shape, tree)
    if describe(x) != describe(output):
        raise ValueError(
            f"layer turns {describe(x)} into {describe(output)}: a layer's output is"
            " the next one's input, so that both must be alike; cast in the layer, or"
            " in the prologue."
        )


def on_automatic_axes(
    function: Callable[..., PyTree], args: Sequence[PyTree], results: PyTree
) -> PyTree:
    """Calls a function on automatic axes; `update` reads the explicit types there."""
    leaves = jax.tree.leaves(args)
    types = [jax.typeof(x).sharding if hasattr(x, "dtype") else None for x in leaves]
    types = [x if is_explicit(x) else None for x in types]

    def run(*args: PyTree) -> PyTree:
        with known_shardings(jax.tree.leaves(args), types):
            return function(*args)

    return with_automatic_axes(run, args, results)


def on_explicit_axes(
    model: ModelFunctions, partition: Partition, batch: PyTree, several: bool
) -> ModelFunctions:
    """The model, on explicit axes if it does not run on automatic ones.

    Raises:
      Exception: The model's own error if it runs on neither kind of axes.
    """
    if not any(map(is_explicit, current().shardings.values())):
        return model
    fixed = model.frozen
    args = [(partition.rest, 0), (partition.layers, 1), (batch, int(several))]
    args += [(fixed and fixed.rest, 0), (fixed and fixed.layers, 1)]
    shardings = [sharding_in_type(x) for x in jax.tree.leaves([x for x, _ in args])]
    mesh = next((x.mesh.abstract_mesh for x in shardings if is_explicit(x)), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return model
    types = lambda mesh: [
        jax.tree.map(functools.partial(_typed, mesh, stacked), tree)
        for tree, stacked in args
    ]
    length = stack_length(partition.layers)
    try:
        _traced(model, length, *types(None))
        return model
    except Exception as error:  # JAX has no class of its own for it
        failed = error
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            return _on_axes(model, mesh, length, *types(mesh))
    except Exception as error:
        # JAX refuses `out_sharding=` on automatic axes (0.10.2 and 0.12.0.1). Otherwise
        # the first error is the model's own.
        of_axes = any(words in str(failed) for words in ("of type Auto", "mesh"))
        raise error if of_axes else failed from None


def _traced(
    model: ModelFunctions, length: int, *types: PyTree
) -> list[list[PartitionSpec]]:
    """Traces the model's functions and their gradients, on the current axes.

    Returns:
      The shardings of a layer's output, of the context, and of the kept outputs.
    """
    specs: list[list[PartitionSpec]] = []

    def total(
        rest: PyTree, weights: PyTree, batch: PyTree, fixed_rest: PyTree, fixed: PyTree
    ) -> Array:
        frozen = model.frozen and dataclasses.replace(model.frozen, rest=fixed_rest)
        one = dataclasses.replace(model, frozen=frozen)
        x, context = one.run_prologue(rest, batch)
        run = lambda x: one.run_layer(weights, fixed, x, context, jnp.int32(0))
        output, kept = run(x)
        if _specs(output) != _specs(x):
            # The second layer is the first one with a layer's output as its input.
            check_same_input(x, output)
            output, kept = run(output)
        kept = jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), kept)
        specs.extend(map(_specs, (output, context, kept)))
        loss, _ = loss_and_metrics(one.run_epilogue(rest, output, kept, batch))
        return jnp.asarray(loss.total if isinstance(loss, WeightedLoss) else loss)

    jax.eval_shape(jax.grad(total, argnums=(0, 1)), *types)
    return specs


def _on_axes(
    model: ModelFunctions, mesh: AbstractMesh, length: int, *types: PyTree
) -> ModelFunctions:
    """The model for callers on automatic axes, with its functions on explicit axes."""
    axes = mesh.explicit_axes

    def on(
        function: Callable[..., PyTree], *specs: list[PartitionSpec]
    ) -> Callable[..., PyTree]:
        flat = tuple(spec for some in specs for spec in some)

        def run(*args: PyTree) -> PyTree:
            leaves, structure = jax.tree.flatten(args)
            call = lambda *leaves: function(*structure.unflatten(leaves))
            typed = jax.sharding.explicit_axes(call, axes=axes, in_sharding=flat)
            return typed(*leaves)

        return run

    x, context, kept = _traced(model, length, *types)
    rest, weights, batch, fixed_rest, fixed = map(_specs, types)
    return dataclasses.replace(
        model,
        prologue=on(model.prologue, rest, fixed_rest, batch),
        layer=on(model.layer, weights, fixed, x, context, [PartitionSpec()]),
        epilogue=on(model.epilogue, rest, fixed_rest, x, kept, batch),
    )


def _typed(mesh: AbstractMesh | None, stacked: int, x: Array) -> jax.ShapeDtypeStruct:
    """The type of an argument, without `stacked` leading axes.

    On a mesh of explicit axes it has its sharding, and otherwise none.
    """
    kind, sharding = jax.typeof(x), sharding_in_type(x)
    spec = PartitionSpec(*sharding.spec[stacked:] if is_explicit(sharding) else ())
    return jax.ShapeDtypeStruct(
        kind.shape[stacked:],
        kind.dtype,
        sharding=mesh and NamedSharding(mesh, spec),
        weak_type=kind.weak_type,
    )


def _specs(tree: PyTree) -> list[PartitionSpec]:
    return [jax.typeof(x).sharding.spec for x in jax.tree.leaves(tree)]
