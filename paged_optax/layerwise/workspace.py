"""Buffers for one layer's gradients, which all layers use."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import tree_flatten_with_path
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, PyTree

from paged_optax.backend.text import keystr, matching_names, path_name
from paged_optax.backend.validation import check_arrays, parameter_dtype
from paged_optax.layerwise.parameters import (
    Shaped,
    by_name,
    placed_shape,
    stack_length,
    widest,
    zeros,
)
from paged_optax.layerwise.slices import is_sliced

_ALLOCATE = "Allocate a workspace with GradientWorkspace.allocate(params['layers'])."
_PASS_REST = (
    "pass the model's parameters without the layers' to GradientWorkspace.allocate as"
    " rest=."
)


class Pending(NamedTuple):
    """Gradients that the next step applies.

    Attributes:
      waits: True if there are any.
      norm: The global norm of all gradients. The layers' gradients are not clipped yet.
      rest: The clipped gradients of the parameters outside the layers.
    """

    waits: Bool[Array, ""]
    norm: Float[Array, ""]
    rest: PyTree[Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gradients", "host", "pending"],
    meta_fields=["accumulates", "on_device"],
)
@dataclasses.dataclass(frozen=True)
class GradientWorkspace:
    """The gradients of one layer, in buffers that all layers share.

    A plain backward pass holds the gradients of all L layers. Here each layer writes
    its gradients into the same buffers, which saves (L - 1) times a layer's bytes:

    - it is allocated once, before training, and donated to every step, which returns
      the same memory;
    - after a step it holds the gradients of the first layer, which is computed last;
    - a leaf that overwrites holds the current layer's gradient; a leaf that accumulates
      adds up gradients until `zero_accumulators`.

    Attributes:
      gradients: One layer's gradients: the tree of a layer, without the leading axis.
      host: Gradients of all layers in host memory, or None; see `allocate`.
      accumulates: For each leaf of `gradients`, true if it accumulates.
      pending: Gradients of a deferred update outside the layers, or None; see
        `allocate`.
      on_device: True if `host` is in device memory.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> layers = {"kernel": jnp.ones((4, 64, 64)), "norm": jnp.ones((4, 64))}
      >>> workspace = po.GradientWorkspace.allocate(layers)
      >>> workspace.gradients["kernel"].shape, workspace.accumulates
      ((64, 64), (False, True))

    References:
      Lv et al., `Full Parameter Fine-tuning for Large Language Models with Limited
      Resources <https://arxiv.org/abs/2306.09782>`_, 2023, for the fused backward.
    """

    gradients: PyTree
    host: PyTree
    accumulates: tuple[bool, ...]
    pending: PyTree = None
    on_device: bool = False

    @classmethod
    def allocate(
        cls,
        layers: PyTree,
        *,
        accumulate: str | Sequence[str] = "*norm*",
        dtype: DTypeLike | None = None,
        host_dtype: DTypeLike | None = None,
        device_dtype: DTypeLike | None = None,
        rest: PyTree | None = None,
    ) -> "GradientWorkspace":
        """Allocates the buffers.

        Args:
          layers: The layers' parameters, stacked on the leading axis of each leaf, or
            their `ShapeDtypeStruct`s.
          accumulate: Paths of leaves that accumulate, or `fnmatch` patterns of paths.
          dtype: The gradients' dtype; None uses each parameter's dtype. `"float32"`
            sums micro-batches in full precision.
          host_dtype: Keeps the gradients of all layers in host memory in this dtype
            too. A step then clips by the exact global norm with one backward pass, and
            accumulates micro-batches in sequence.
          device_dtype: The same in device memory, instead of `host_dtype`: for many
            micro-batches on a device with room for the gradients of all layers.
          rest: The parameters outside the layers, or their `ShapeDtypeStruct`s. With
            `rest` and `host_dtype` updates are deferred: a step stores its gradients in
            the workspace, and the next step applies them. The step's `finish` applies
            the last gradients.

        Returns:
          The workspace, all zeros.

        Raises:
          ValueError: If a leaf has no leading axis, or another length than the others;
            if layers are not stacked; if `rest` is given without `host_dtype`, or is no
            mapping; if both `host_dtype` and `device_dtype` are given.
        """
        check_arrays("layers", layers)
        on_device = device_dtype is not None
        if on_device and host_dtype is not None:
            raise ValueError(
                "host_dtype and device_dtype are both given: leave one out, the"
                " gradients of all layers are in one memory."
            )
        host_dtype = device_dtype if on_device else host_dtype
        if rest is not None and host_dtype is None:
            raise ValueError(
                "rest is given and host_dtype is None: a deferred update finds the"
                " layers' gradients on the host. Pass host_dtype too, for example"
                " 'bfloat16'; or leave rest out."
            )
        if dtype is not None:
            dtype = parameter_dtype("dtype", dtype)
        flat, structure = tree_flatten_with_path(layers)
        names = [path_name(path) for path, _ in flat]
        stacks = [x for _, x in flat]
        stack_length(layers)
        patterns = [accumulate] if isinstance(accumulate, str) else accumulate
        accumulated = set[str]().union(*(matching_names(p, names) for p in patterns))
        host = None
        if host_dtype is not None:
            name = "device_dtype" if on_device else "host_dtype"
            host_dtype = parameter_dtype(name, host_dtype)
            stored = lambda x: zeros(
                x, x.shape, host_dtype, host=is_sliced(x) and not on_device
            )
            host = jax.tree.map(stored, layers)
        gradients = [
            zeros(x, x.shape[1:], jax.typeof(x).dtype if dtype is None else dtype)
            for x in stacks
        ]
        return cls(
            jax.tree.unflatten(structure, gradients),
            host,
            tuple(name in accumulated for name in names),
            None if rest is None else _nothing_pending(rest, gradients, stacks[0]),
            on_device,
        )

    def write(self, gradients: PyTree[Array]) -> "GradientWorkspace":
        """Writes or adds one layer's gradients.

        Args:
          gradients: One layer's gradients, of the structure of `self.gradients`.

        Returns:
          The workspace.

        Raises:
          ValueError: If they are of other shapes than one layer's.
        """
        check_arrays("gradients", gradients)
        described = lambda tree: jax.tree.map(lambda x: x.shape, tree)
        shapes, expected = described(gradients), described(self.gradients)
        if shapes != expected:
            raise ValueError(
                f"gradients of the shapes {shapes} are not those of one layer:"
                f" {expected}."
            )
        add = lambda old, new, adds: (
            old + new.astype(old.dtype) if adds else new.astype(old.dtype)
        )
        return self._changed(add, gradients)

    def zero_accumulators(self) -> "GradientWorkspace":
        """Sets the leaves that accumulate to zero.

        Call it before each layer, or gradients add up over the layers.

        Returns:
          The workspace.
        """
        return self._changed(lambda x, adds: jnp.zeros_like(x) if adds else x)

    def _changed(
        self, change: Callable[..., Array], *trees: PyTree
    ) -> "GradientWorkspace":
        structure = jax.tree.structure(self.gradients)
        accumulates = structure.unflatten(self.accumulates)
        new = jax.tree.map(change, self.gradients, *trees, accumulates)
        return dataclasses.replace(self, gradients=new)

    def abstract(self, params: PyTree) -> "GradientWorkspace":
        """Returns shapes, dtypes and placements of this workspace.

        `abstract_state(workspace, params)` returns the same: the target of a restore.

        Args:
          params: All parameters, or their `ShapeDtypeStruct`s.

        Returns:
          The workspace of `jax.ShapeDtypeStruct`s, each with its memory kind stated.

        Raises:
          ValueError: If the workspace is allocated for other parameters.
        """
        rest = by_name(params)
        if not rest:
            raise ValueError(
                f"params is of type {type(params).__name__}: pass the mapping of all"
                " parameters, as layerwise_step gets it."
            )
        layer = jax.tree.structure(self.gradients)
        same = (name for name, x in rest.items() if jax.tree.structure(x) == layer)
        layers = rest.pop("layers" if "layers" in rest else next(same, [*rest][0]))
        self.check(layers, rest)
        layers, rest = jax.tree.map(placed_shape, (layers, rest))
        typed = lambda x, g: zeros(x, g.shape, g.dtype)
        stored = lambda x, g: zeros(
            x, g.shape, g.dtype, host=is_sliced(x) and not self.on_device
        )
        gradients = jax.tree.map(typed, layers, self.gradients)
        host, pending = self.host, self.pending
        if host is not None:
            host = jax.tree.map(stored, layers, host)
        if pending is not None:
            stack = jax.tree.leaves(layers)[0]
            pending = _nothing_pending(rest, jax.tree.leaves(gradients), stack)
        return dataclasses.replace(
            self, gradients=gradients, host=host, pending=pending
        )

    def check(self, layers: PyTree, rest: PyTree = None) -> None:
        """Raises if the workspace is allocated for a model of other sizes.

        Args:
          layers: The layers' parameters, stacked.
          rest: The other parameters, for deferred updates.

        Raises:
          ValueError: If the sizes differ; the message names the leaf.
        """
        one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], jax.typeof(x).dtype)
        layer = jax.tree.map(one, layers)
        _check_same("", self.gradients, layer, _ALLOCATE)
        if self.host is not None:
            _check_same(".host", self.host, layers, _ALLOCATE)
        if self.pending is not None:
            _check_same(".pending.rest", self.pending.rest, rest, _PASS_REST)


def _check_same(field: str, allocated: PyTree, model: PyTree, hint: str) -> None:
    """Raises if buffers have other names or shapes than a model's."""
    shapes, expected = (
        {keystr(path): x.shape for path, x in tree_flatten_with_path(tree)[0]}
        for tree in (allocated, model)
    )
    for name in (*expected, *shapes):
        if shapes.get(name) != expected.get(name):
            raise ValueError(
                f"workspace{field}{name} is allocated for the shape {shapes.get(name)},"
                f" and the model has {expected.get(name)} there: {hint}"
            )
    if [*shapes] != [*expected]:
        raise ValueError(
            f"workspace{field} has its leaves in another order than the model: {hint}"
        )


def _nothing_pending(
    rest: PyTree, gradients: Sequence[Shaped], stack: Shaped
) -> Pending:
    """Zeros for the gradients of the other parameters, and for the norm."""
    check_arrays("rest", rest)
    children = by_name(rest)
    if children is None:
        raise TypeError(
            f"rest is of type {type(rest).__name__}: pass a mapping of the parameters"
            " without the layers', as the prologue gets it."
        )
    empty: Callable[..., PyTree] = zeros
    return Pending(
        empty(stack, (), jnp.bool_),
        empty(stack, (), widest(rest, gradients)),
        jax.tree.map(lambda x: empty(x, x.shape, jax.typeof(x).dtype), children),
    )
