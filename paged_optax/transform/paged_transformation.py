"""A paged transformation: its configuration, and steps common to init and update."""

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import check_effects, trace
from paged_optax.analysis.per_leaf import analyse
from paged_optax.analysis.program import Analysis, Constant, LeafUpdate
from paged_optax.backend import memory
from paged_optax.backend.flax_variables import with_variables_of
from paged_optax.backend.memory import (
    PINNED_HOST,
    device_memory,
    is_mistyped,
    on_host,
    resolve_host_memory_kind,
)
from paged_optax.backend.processes import Values
from paged_optax.backend.text import dtype_and_shape, keystr, readable_bytes
from paged_optax.backend.types import ArrayOrShape, shape_dtype
from paged_optax.backend.user_warnings import warn_user
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.shards import Shards
from paged_optax.engine.sharing import Geometry, cut, uncut
from paged_optax.transform.checks import (
    check_own_counts,
    check_state_structure,
    check_unchanged,
)
from paged_optax.transform.codec_rules import Rule
from paged_optax.transform.context import Gate, current
from paged_optax.transform.parameter_shardings import ParameterShardings
from paged_optax.transform.state_layout import StateLayout
from paged_optax.transform.trees import (
    StoredOrShape,
    Traceable,
    is_traceable,
    leaf_paths,
    parameter_of,
)

_PAIRS = (
    "XLA:TPU makes two arrays of one of 64-bit or complex values, and pages neither:"
    " use real parameters of 32 bits or fewer"
)
_BYTES = "a TPU slices no bytes in host memory: use master_remainders=True, in 16 bits"


class TracedUpdate(NamedTuple):
    """The programs of an update, and arrays that are no leaves of its trees."""

    analysis: Analysis
    constants: dict[int, ArrayLike]  # closed over, by number
    extras: Sequence[Traceable]  # the arrays of the extra arguments, and the restart


@dataclasses.dataclass(frozen=True, eq=False)
class PagedTransformation:
    """A transformation, and the arguments of `paged`."""

    inner: optax.GradientTransformationExtraArgs
    page_size: int | None  # None: chosen for each leaf
    device_budget: int | Literal["auto"] | None
    min_paged_size: int
    host_memory_kind: str
    rules: Mapping[str, Rule]  # of codecs; from `codec_rules.check`
    per_parameter_steps: bool
    known: ParameterShardings
    on_moved: str

    def budget(self, parameters: int, moments: int = 0) -> int | None:
        """Returns the device budget in bytes; None: all moments stay.

        `"auto"` takes the free memory of the device, less a reserve for a training
        step: gradients (as many bytes as parameters) and, for activations and pages, a
        quarter of the device's memory. If the backend keeps no statistics (CPU),
        everything is paged. `parameters` are bytes on the device already, and `moments`
        bytes on the device that count as free.
        """
        if self.device_budget != "auto":
            return self.device_budget
        if jax.process_count() > 1:
            raise ValueError(
                f"device_budget='auto' in one of {jax.process_count()} processes: each"
                " would measure its own devices and build another program. Pass bytes."
            )
        limit, used = device_memory()
        return max(0, limit - used + moments - parameters - limit // 4)

    def in_variables_of(self, tree: PyTree) -> "PagedTransformation":
        """Returns a transformation that calls `inner` with a tree's variables."""
        inner = with_variables_of(tree, self.inner)
        return self if inner is self.inner else dataclasses.replace(self, inner=inner)

    def take_apart(
        self, updates: PyTree, state: PyTree, params: PyTree | None
    ) -> tuple[StateLayout, list[StoredOrShape]]:
        """Returns a state's layout, and its leaves as they are stored."""
        # Coded moments are divided as the parameter is, or as the gradient.
        like, shapes = updates if params is None else params, state
        if self.rules or self.per_parameter_steps:
            # Coded moments, and a count for each parameter, hide the shapes of the
            # state of `inner`. A new function each time: JAX caches traces as long as
            # the function lives.
            init = lambda params: self.inner.init(params)
            shapes = jax.eval_shape(init, jax.tree.map(shape_dtype, like))
        try:
            arrays = jax.tree.structure(shapes).flatten_up_to(state)
        except ValueError as error:
            check_state_structure(self.inner, like, state, error)
            raise
        paths, grads = leaf_paths(updates)
        indices = parameter_of(leaf_paths(shapes)[0], paths)
        moment_of = {
            i: x
            for i, x in zip(indices, arrays, strict=True)
            if i is not None and getattr(x, "shape", None) == grads[i].shape
        }
        triples = zip(paths, jax.tree.leaves(like), grads, strict=True)
        shards = [
            self.known.find(path, moment_of.get(i, x), x, gradient)
            for i, (path, x, gradient) in enumerate(triples)
        ]
        settings = self.rules, self.per_parameter_steps
        layout = StateLayout.create(shapes, like, shards, *settings, indices, arrays)
        return layout, layout.take_apart(arrays)

    def geometry(
        self,
        leaf: LeafUpdate,
        moments: Sequence[MomentFormat],
        shards: Shards | None = None,
        like_leaves: int = 1,
    ) -> Geometry:
        """Cuts leaves with identical programs into pages."""
        shape, context = shards.local(leaf.shape) if shards else leaf.shape, current()
        if not leaf.program.elementwise or not moments:
            # A norm, a factored moment or a matrix product needs the whole leaf.
            return uncut(shape)
        spare = context.spare_bytes, context.isolate
        pages = cut(shape, tuple(moments), self.page_size, like_leaves, *spare)
        if not (shards and context.layerwise) or context.isolate or pages.gpu.count > 1:
            return pages
        # A shard of one page is in no loop of pages: to isolate it, the host waits.
        gpu = dataclasses.replace(pages.gpu, isolated=False)
        return dataclasses.replace(pages, gpu=gpu)

    def refused(self, layout: StateLayout, index: int) -> str:
        """Returns why a moment cannot be sliced in host memory, or ""."""
        leaf, platform = layout.leaves[index], memory.platform()
        moment = MomentFormat(leaf.aval.dtype.itemsize, leaf.codec)
        if platform == "tpu" and moment.codec is None and moment.itemsize > 4:
            return _PAIRS
        if platform == "tpu" and leaf.aval.dtype == jnp.int8:
            return _BYTES
        return cut(leaf.local, (moment,), self.page_size).on(platform).refused

    def trace(
        self,
        layout: StateLayout,
        updates: PyTree,
        state: PyTree,
        params: PyTree | None,
        extra_args: Mapping[str, PyTree],
        restart: Gate = False,
    ) -> TracedUpdate:
        """Traces `inner.update` once, as one program a leaf.

        `state` is as `inner` sees it. If `restart`, it ends as `inner.init` makes it.
        """
        extras, structure = jax.tree.flatten((restart, extra_args))
        arrays = list(filter(is_traceable, extras))

        def function(
            updates: PyTree, state: PyTree, params: PyTree, arrays: Sequence[Traceable]
        ) -> tuple[PyTree, PyTree]:
            values = iter(arrays)
            merged = [next(values) if is_traceable(x) else x for x in extras]
            reset, extra_args = structure.unflatten(merged)
            # A restart is traced too, so that each page is reset as it is updated.
            new = self.inner.update(updates, state, params, **extra_args)
            if reset is False:
                return new
            first = self.inner.init(updates if params is None else params)
            restarted = lambda first, new: jnp.where(reset, first, new)
            return new[0], jax.tree.map(
                lambda first, new: restarted(first, new).astype(jnp.asarray(new).dtype),
                first,
                new[1],
            )

        paths, grads = leaf_paths(updates)
        try:
            closed, shapes = trace(function, updates, state, params, arrays)
        except (AttributeError, TypeError, ValueError) as error:
            check_state_structure(self.inner, updates, state, error)
            raise
        check_effects(closed)
        check_unchanged(shapes, updates, state)
        first = len(grads)
        owners = [*range(first), *[None] * len(layout.leaves)]
        owners += range(len(jax.tree.leaves(params)))
        # The computation shows the owner of a moment: its gradient enters it.
        analysis, constants = analyse(
            closed,
            [*owners, *[None] * len(arrays)],
            [*range(first), *layout.param_indices],
            lambda i: f"parameter {keystr(paths[i])}",
            range(len(closed.out_avals)),
        )
        if layout.counts:
            counts = {first + index for index in layout.counts}
            check_own_counts(analysis, counts, state, first)
        return TracedUpdate(analysis, constants, arrays)

    def agreement(
        self,
        params: PyTree[ArrayOrShape],
        state: PyTree[ArrayOrShape],
        layout: StateLayout,
        analysis: Analysis,
    ) -> Values:
        """Returns the facts on which the program of an update depends.

        All processes of a training must agree on them.
        """
        programs = (leaf.program for leaf in analysis.leaf_updates)
        programs = analysis.shared.program, *programs, analysis.tail.program
        distinct = dict.fromkeys(programs)  # leaves of one shape have equal programs
        eqns = [x for program in distinct for x in program.eqns]
        operands = [x for one in eqns for x in one.inputs]
        operands += [x for program in distinct for x in program.outputs]
        constants = [str(x.value) for x in operands if isinstance(x, Constant)]
        names = " ".join([x.primitive.name for x in eqns])
        kind = lambda x: dtype_and_shape(jax.typeof(x)) + " on the host" * on_host(x)
        types = lambda tree: {
            keystr(path): kind(x) for path, x in zip(*leaf_paths(tree), strict=True)
        }
        divisions = zip(leaf_paths(params)[0], layout.parameter_shards, strict=True)
        settings = "page_size device_budget min_paged_size host_memory_kind".split()
        settings.append("per_parameter_steps")
        return {
            **{name: {"": str(getattr(self, name))} for name in settings},
            # The text of a codec has the address of its object.
            "codec": {
                repr([key]): re.sub(r" at 0x[0-9a-f]+", "", repr(rule))
                for key, rule in self.rules.items()
            },
            "parameter ": types(params),
            "how they are divided, ": {
                keystr(path): f"{x.spec} over {dict(x.mesh.shape)}"
                for path, x in divisions
                if x
            },
            "state": types(state),
            "constant ": dict.fromkeys(constants, "in the transformation"),
            "what it computes": {
                "": f"{len(eqns)} operations, {zlib.crc32(names.encode()):08x}"
            },
        }

    def moved(self, layout: StateLayout, leaves: Sequence[StoredOrShape]) -> str:
        """Returns the warning text for moments beyond `device_budget`, or ""."""
        if not isinstance(self.device_budget, int):
            return ""
        if resolve_host_memory_kind(self.host_memory_kind) != PINNED_HOST:
            return ""  # this backend has no pinned host memory
        small = layout.small(self.min_paged_size)
        moved = {
            index: layout.leaves[index].size or 0
            for index, x in enumerate(leaves)
            if not (small[index] or on_host(x) or self.refused(layout, index))
        }
        if sum(moved.values()) <= self.device_budget:
            return ""
        paths, _ = leaf_paths(layout.shapes)
        return (
            f"{len(moved)} moments of {readable_bytes(sum(moved.values()))} are in"
            f" device memory, state{keystr(paths[min(moved)])} first, and"
            f" device_budget={readable_bytes(self.device_budget)} leaves them no room:"
            " a jax.device_put, a restore or out_shardings without a memory kind moved"
            " them; or they were small, and now count as large together with others of"
            " their shape. If they are to stay, pass device_budget=None; if not, put"
        )

    def warn_of_mistyped(self, state: PyTree) -> None:
        """Warns of host arrays with the type of device memory, or raises."""
        for path, x in zip(*leaf_paths(state), strict=True):
            if is_mistyped(x):
                tell(
                    f"state{keystr(path)} is in host memory, and has the type of"
                    " device memory, where it is about to go: a restore made it with"
                    " a SingleDeviceSharding. Put",
                    self.on_moved,
                )
                break


def tell(what: str, on_moved: str, name: str = "state") -> None:
    """Warns of misplaced arrays in the argument `name`, or raises.

    `what` names the arrays, their place and its cause, and ends with "put".
    """
    message = (
        f"{what} the {name} back by paged_optax.place_state(tx, {name}, params)."
        " paged(..., on_moved='raise') makes this an error, and 'warn' a warning."
    )
    if on_moved == "raise":
        raise ValueError(message)
    warn_user(message)
