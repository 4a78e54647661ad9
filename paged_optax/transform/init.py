"""The init of a paged transformation."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import PyTree

from paged_optax.analysis.flat import check_effects, trace
from paged_optax.analysis.per_leaf import analyse
from paged_optax.analysis.program import Analysis, Evaluation, LeafUpdate
from paged_optax.backend.flax_variables import (
    as_pure,
    fixed_variables,
    optimizer_shardings,
    parameter_shardings,
    unflatten_like,
)
from paged_optax.backend.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    default_memory_kind,
    donate_within_memory,
    nbytes,
    on_host,
    replicated_sharding,
    resolve_host_memory_kind,
)
from paged_optax.backend.processes import compare, spans_processes
from paged_optax.backend.text import keystr, readable_bytes
from paged_optax.backend.types import (
    is_committed,
    is_traced,
    typed_automatic,
    varying_axes,
    with_automatic_axes,
    without_explicit_axes,
)
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import check_arrays
from paged_optax.engine.backend_check import check_backend
from paged_optax.engine.pages import MomentFormat
from paged_optax.engine.shards import Shards, constrained
from paged_optax.engine.stream import fill
from paged_optax.transform.checks import check_dtype, check_not_nested
from paged_optax.transform.context import current, known_shardings
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.state_layout import StateLayout, resident
from paged_optax.transform.trees import (
    Parameter,
    StoredOrShape,
    Value,
    as_arrays,
    leaf_paths,
    parameter_of,
)


def init(paged: PagedTransformation, params: optax.Params) -> optax.OptState:
    """Makes the state of `inner`, its larger arrays in host memory."""
    check_not_nested()
    if current().plain:
        return paged.inner.init(params)
    metadata = optimizer_shardings(params)
    shardings = jax.tree.leaves(params), parameter_shardings(params)
    with known_shardings(*shardings):
        bare = paged.in_variables_of(params), as_pure(params)
        state = donate_within_memory(_new_state(*bare, metadata))
    structure = jax.tree.structure(as_pure(params))
    if structure == jax.tree.structure(params):
        return state
    variables = jax.eval_shape(paged.inner.init, params)
    leaves = [
        unflatten_like(params, x) if jax.tree.structure(x) == structure else x
        for x in jax.tree.structure(as_pure(variables)).flatten_up_to(state)
    ]
    return fixed_variables(jax.tree.unflatten(jax.tree.structure(variables), leaves))


def _new_state(
    paged: PagedTransformation,
    params: optax.Params,
    metadata: Sequence[NamedSharding | None],
) -> optax.OptState:
    check_arrays("params", params, numbers=True)
    params = as_arrays(params)
    paths, leaves = leaf_paths(params)
    for path, leaf in zip(paths, leaves, strict=True):
        check_dtype(path, leaf)
    # Over automatic axes the types of a traced step's arrays have no sharding: `update`
    # needs the ones that `init` sees.
    visitor = current().visitor
    visit = visitor and visitor.init
    see = functools.partial(paged.known.see, remember=visit is None)
    state = NewState.create(paged, params, list(map(see, paths, leaves, metadata)))
    layout = state.layout
    if visit is not None:
        visit(state)
    if is_traced(leaves):
        parameters = state.divided_parameters(leaves)
        types = [x.types(parameters) for x in layout.leaves]
        return layout.build(with_automatic_axes(state.arrays, (leaves,), types))
    if spans_processes(leaves):
        # Before JAX itself waits for the others, where scalars are placed.
        settings = paged.agreement(params, layout.shapes, layout, state.analysis)
        compare("init of a paged transformation", settings, once=False)
    with without_explicit_axes():
        return layout.build(tied(state.arrays(leaves), leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class NewState:
    """A new state: its leaves, their programs, and their placement."""

    paged: PagedTransformation
    params: optax.Params
    layout: StateLayout
    # For each parameter the sharding of its moments, if they are divided apart from it.
    shardings: Sequence[NamedSharding | None]
    on_device: list[bool]  # for each leaf whether it is on the device
    refused: Mapping[int, str]  # reason why a leaf cannot be sliced in host memory
    analysis: Analysis
    constants: Mapping[int, ArrayLike]  # arrays that the programs close over, by number

    @classmethod
    def create(
        cls,
        paged: PagedTransformation,
        params: optax.Params,
        shardings: Sequence[NamedSharding | None],
    ) -> "NewState":
        """Traces `inner.init`, and chooses the leaves that stay on the device."""
        paths, leaves = leaf_paths(params)
        shards = [
            Shards.create(sharding, x.shape) or paged.known.find(path, x)
            for sharding, path, x in zip(shardings, paths, leaves, strict=True)
        ]
        closed, shapes = trace(paged.inner.init, params)
        check_effects(closed)
        settings = paged.rules, paged.per_parameter_steps
        indices = parameter_of(leaf_paths(shapes)[0], paths)
        layout = StateLayout.create(shapes, params, shards, *settings, indices)
        # Moments of a parameter stay or go as one, and so do moments of a stack.
        stack_of = dict(current().stacks)
        owners = [("stack", stack_of[x]) if x in stack_of else x for x in paths]
        on_device = resident(
            [x.size for x in layout.leaves],
            [None if i is None else owners[i] for i in indices],
            paged.budget(parameters=nbytes(leaves)),
            layout.small(paged.min_paged_size),
        )
        refused: dict[int, str] = {}
        if not all(on_device):
            kind = resolve_host_memory_kind(paged.host_memory_kind)
            if kind == PINNED_HOST:
                check_backend()
                moving = [i for i, stays in enumerate(on_device) if not stays]
                reasons = {i: paged.refused(layout, i) for i in moving}
                refused = {i: reason for i, reason in reasons.items() if reason}
            stay = kind != PINNED_HOST
            on_device = [x or stay or i in refused for i, x in enumerate(on_device)]
        unowned = [None] * len(leaves), [None] * len(on_device)
        traced = analyse(closed, *unowned, str)
        new = cls(paged, params, layout, shardings, on_device, refused, *traced)
        if current().visitor is None:
            new.warn()
        return new

    def warn(self) -> None:
        """Warns of moments that are not paged, or have other axes than Flax's metadata.

        `plan` lists them itself.
        """
        paths, _ = leaf_paths(self.layout.shapes)
        if self.refused:
            (first, reason), *remaining = self.refused.items()
            more = f" and {len(remaining)} other moments" if remaining else ""
            warn_user(
                f"state{keystr(paths[first])}{more} cannot be paged, and are in device"
                f" memory: {reason}."
            )
        ranks = [len(x.shape) for x in jax.tree.leaves(self.params)]
        for path, leaf in zip(paths, self.layout.leaves, strict=True):
            if leaf.param_index is None or leaf.aval.size < 2:
                continue
            sharding, shape = self.shardings[leaf.param_index], leaf.aval.shape
            if sharding is not None and len(shape) < ranks[leaf.param_index]:
                warn_user(
                    f"state{keystr(path)} of shape {shape} has other axes than its"
                    " parameter, whose optimizer_sharding divides by"
                    f" {sharding.spec}: it is on all devices, whole."
                )
                break

    def divided_parameters(
        self, parameters: Sequence[Parameter]
    ) -> Sequence[Parameter]:
        """Returns parameters, or types with the sharding of their moments."""
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if sharding else x
            for x, sharding in zip(parameters, self.shardings, strict=True)
        ]

    def arrays(self, parameters: Sequence[Parameter]) -> list[StoredOrShape]:
        """Computes the state's leaves, as they are stored, each in its memory."""
        evaluation = Evaluation(self.analysis, parameters, self.constants)
        leaves = self.analysis.leaf_updates
        divided = self.divided_parameters(parameters)
        try:
            new = [self._leaf(leaf, evaluation.inputs(leaf)) for leaf in leaves]
            results = enumerate(evaluation.results(new))
            return [self._placed(i, value, divided) for i, value in results]
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):  # JAX has no type of its own for it.
                pairs = zip(self.layout.leaves, self.on_device, strict=True)
                moving = sum(x.size or 0 for x, stays in pairs if not stays)
                error.add_note(
                    f"The moments take {readable_bytes(moving)} of host memory in all;"
                    " plan(tx, params) lists them. codec= stores them in fewer bytes."
                )
            raise

    def _leaf(self, leaf: LeafUpdate, inputs: list[Value]) -> list[Value]:
        """Runs the program of one leaf, page by page if it is on the host or coded."""
        (index,) = leaf.outputs
        stored, on_device = self.layout.leaves[index], self.on_device[index]
        codec, dtype = stored.codec, stored.aval.dtype
        if on_device and codec is None and stored.shards is None:
            return leaf.program(inputs)
        if current().visitor is not None:
            # Pages take long to trace, and only types matter.
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stored.stored)
            return [zeros if on_device else jax.device_put(zeros, HOST)]
        # Page by page: 8 bytes a parameter must never exist on the device, not even for
        # a moment.
        sharding = (
            None if stored.param_index is None else self.shardings[stored.param_index]
        )
        if sharding is not None and not is_traced(inputs):
            divide = lambda x: jax.device_put(x, sharding)
            inputs = [divide(x) if x.shape == leaf.shape else x for x in inputs]
        if stored.shards is None and not is_traced(inputs):
            # Pages are written into a buffer whose type names no mesh.
            inputs = [typed_automatic(x) for x in inputs]
        formats = [MomentFormat(dtype.itemsize, codec, not on_device)]
        new = fill(
            tuple(inputs),
            jnp.zeros(2, jnp.uint32) if codec and codec.draws else None,
            program=leaf.program,
            geometry=self.paged.geometry(leaf, formats, stored.shards),
            dtype=dtype,
            codec=codec,
            host=not on_device,
            shards=stored.shards,
            axes=varying_axes(leaf.avals),
        )
        return [new]

    def _placed(
        self, index: int, value: Value, parameters: Sequence[Parameter]
    ) -> StoredOrShape:
        """Places a leaf as its parameter, in its own memory.

        Leaves of no parameter are replicated over the parameters' mesh.
        """
        leaf, host = self.layout.leaves[index], not self.on_device[index]
        like = None if leaf.param_index is None else parameters[leaf.param_index]
        meshes = [x.mesh for x in self.layout.parameter_shards if x]
        if leaf.codec is None:
            value = jnp.asarray(value, leaf.aval.dtype)
            if is_traced(value) and not on_host(value):
                # XLA would replicate what it can compute anywhere, such as zeros.
                value = constrained(value, leaf.shards)

        def placed(x: Array) -> Array:
            sharding = None
            known = is_committed(like) or isinstance(like, jax.ShapeDtypeStruct)
            if is_traced((x, like)):
                pass  # its type has its placement
            elif known and like is not None and like.shape == x.shape:
                sharding = like.sharding
            elif leaf.shards is None and meshes and isinstance(meshes[0], Mesh):
                sharding = NamedSharding(meshes[0], PartitionSpec())
            elif is_committed(like) and len(like.sharding.device_set) == 1:
                # Coded moments have other shapes.
                sharding = replicated_sharding([like])
            if sharding is not None:
                # A parameter may be on the host, as an offloaded layer is.
                if host or (like is not None and on_host(like)):
                    kind = default_memory_kind(host)
                    sharding = sharding.with_memory_kind(kind)
                return jax.device_put(x, sharding)
            # The default device, and the memory alone.
            if on_host(x) != host:
                return jax.device_put(x, HOST if host else DEVICE)
            return x

        return jax.tree.map(placed, value)


def tied(state: PyTree, parameters: Sequence[object]) -> PyTree:
    """Commits a new state to the devices of its host arrays, and of its parameters.

    A program that uses host arrays, or committed ones, returns committed arrays. If a
    step count was not committed before, `jax.jit` would compile the next step again. A
    traced state, as of parameters that a `jax.jit` closes over, is committed when its
    program runs.
    """
    leaves = jax.tree.leaves(state)
    if is_traced((leaves, parameters)):
        return state
    tying = [*filter(is_committed, parameters), *filter(on_host, leaves)]
    sharding = replicated_sharding(tying)
    if sharding is None or any(
        x.sharding.device_set != sharding.device_set for x in tying
    ):
        return state
    tie = lambda x: x if is_committed(x) else jax.device_put(x, sharding)
    return jax.tree.map(tie, state)
