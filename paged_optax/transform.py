"""`paged`: any Optax transformation, its state in host memory."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from paged_optax import granularity, memory
from paged_optax.choice import CodecLike, check, choose, draws
from paged_optax.codecs import Codec, draw
from paged_optax.context import Gate, current
from paged_optax.donation import paired
from paged_optax.gate import either, gates_of
from paged_optax.geometry import Geometry, Kept, Pages, cut, uncut
from paged_optax.layout import Layout, OtherLayoutError
from paged_optax.memory import (
    DEVICE,
    HOST,
    PINNED_HOST,
    memory_kinds,
    mistyped,
    nbytes,
    on_host,
    resolve_host_memory_kind,
)
from paged_optax.plan import (
    Configuration,
    Moment,
    parameter_of,
    resident,
)
from paged_optax.precision import counted, in_float32, with_master_weights
from paged_optax.progress import LARGE, progress
from paged_optax.selfcheck import check_backend
from paged_optax.sharding import (
    UNSHARDED,
    Known,
    Shards,
    automatically,
    without_explicit_axes,
)
from paged_optax.slices import Streamed
from paged_optax.stream import fill, stream
from paged_optax.table import readable_bytes
from paged_optax.variables import bare, like, settled

_keystr = jax.tree_util.keystr


def paged(
    inner: optax.GradientTransformation,
    *,
    page_size: int | str = "16MiB",
    device_budget: int | str | None = "0B",
    min_paged_size: int | str = "256KiB",
    host_memory_kind: str = "pinned_host",
    shardings: Any = None,
    per_parameter_steps: bool = False,
    codec: CodecLike | Mapping[str, CodecLike | Mapping[str, CodecLike]] = None,
    master_dtype: Any = None,
    on_moved: str = "warn",
) -> optax.GradientTransformationExtraArgs:
    r"""Pages a transformation: its moments live on the host, its numbers stay.

    `update` streams each leaf's moments through the device, one page after the other:

    .. math::
        (u_p, s_p) \leftarrow \mathrm{inner}(g_p, s_p, \theta_p)
        \quad\text{for each page } p \text{ of each leaf.}

    Updates overwrite the gradients' buffers and moments their own, so that with
    donated gradients and state a step allocates a few pages and nothing else. What a
    page may be is read off `inner.update`'s jaxpr: a block of rows where it works
    element by element, a whole leaf where it works within a leaf.

    The state is Optax's own: the tree, shapes and dtypes of `inner.init(params)`, its
    larger arrays in host memory. A checkpoint of `inner` loads into `paged(inner)`.
    `update` reads from the arrays' types where each lives: host leaves stream, device
    leaves are updated in place.

    `update(..., active=...)` updates some parameters only: a pytree of bools, static or
    traced, of the gradients' structure or a prefix of it (mixtures of experts,
    adapters, sampled or frozen layers). The others keep their moments and, with
    `per_parameter_steps`, their step count; their updates are zero, and no byte of
    theirs crosses the link. Counts that all parameters share stand still when none is
    active.

    Args:
      inner: The transformation. It may not combine several parameters: chain
        `optax.clip_by_global_norm` and its like outside.
      page_size: Bytes of one page of one moment, an int or a string such as
        `"16MiB"`; with a codec, bytes of the float32 that it decodes to.
      device_budget: Bytes of moments that may stay on the device: 0 pages everything,
        None nothing. `"auto"` takes what the device has free at `init` less a reserve:
        the parameters' bytes again for gradients, and a quarter of the device.
      min_paged_size: Moments of fewer bytes stay on the device: a transfer of a few
        kilobytes costs its latency, and saves nothing.
      host_memory_kind: `"pinned_host"`, or `"auto"` to keep the moments on the device
        where a backend has no pinned host memory.
      shardings: The parameters' shardings over a mesh, a pytree of `NamedSharding` or
        `PartitionSpec` of their structure or a prefix of it, where they cannot be read
        off the arrays: see `paged_optax.sharding`.
      per_parameter_steps: Whether each parameter counts its own steps, for its bias
        corrections and schedules. Each integer scalar of the state is then a tree of
        the parameters' structure.
      codec: How moments are stored: the name of a codec (`"dynamic_int8"`,
        `"dynamic_int4"`, `"float8_e4m3"`, `"bfloat16"`, `"bfloat16_stochastic"`), an
        object like those of `paged_optax.codecs`, or several by moment and by pattern
        of parameter paths, of which the last that applies counts:
        `{"mu": "bfloat16", "nu": "dynamic_int8", "*/embedding": "float32"}`. `inner`
        computes in float32. Moments of fewer than 4096 values are stored in float32.
        A codec's name takes no sign's bit for Optax's moments of squares, `nu` and its
        like; for one of your own name it: `{"*": "dynamic_int8", "energy":
        DynamicInt8(signed=False)}`. A block of a moment that holds NaN or an infinity
        comes back with nothing finite in it: chain `apply_if_finite` around.
      master_dtype: Keeps a copy of the parameters in this dtype, paged like a moment,
        for parameters in fewer bits: `"float32"`. The moments have it too.
      on_moved: What `update` does where it finds moments on the device that belong on
        the host: `"warn"`, or `"raise"`, before XLA sees them. `place_state` puts them
        back.

    Returns:
      A transformation to use wherever `inner` was used.

    Raises:
      ValueError: If an argument is not usable, at once; at `update`, if `inner`
        combines parameters, if it has effects such as `jax.debug.print`, or if
        parameters or gradients are found in host memory.
      TypeError: At `init`, if a parameter is not of floating point or complex dtype.

    Example:
      >>> import jax.numpy as jnp, optax, paged_optax as po
      >>> tx = po.paged(optax.lion(1e-4), page_size="1MiB")
      >>> params = {"w": jnp.ones((512, 512))}
      >>> state = tx.init(params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'
      >>> updates, state = tx.update(params, state, params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'

    References:
      Dettmers et al., `QLoRA <https://arxiv.org/abs/2305.14314>`_, 2023, for paged
      optimizers; the streaming itself is described in `paged_optax.stream`.
    """
    for method in ("init", "update"):
        if not callable(getattr(inner, method, None)):
            raise ValueError(
                f"inner={inner!r} is not an Optax transformation: pass one, such as"
                " paged(optax.adamw(1e-3))."
            )
    configuration = Configuration.of(
        page_size, device_budget, min_paged_size, host_memory_kind
    )
    rules = check(codec)
    inner = optax.with_extra_args_support(inner)
    if master_dtype is not None:
        inner = with_master_weights(inner, master_dtype)
    elif rules:
        inner = in_float32(inner)
    if draws(rules):
        inner = counted(inner)
    if on_moved not in ("warn", "raise"):
        raise ValueError(f"on_moved={on_moved!r}: pass 'warn' or 'raise'.")
    known = Known(shardings)
    pager = _Pager(inner, configuration, rules, per_parameter_steps, known, on_moved)
    return optax.GradientTransformationExtraArgs(pager.init, pager.update)


class _Pager:
    """`init` and `update` of one paged transformation."""

    def __init__(
        self,
        inner: optax.GradientTransformationExtraArgs,
        configuration: Configuration,
        rules: dict[str, Any],
        per_parameter_steps: bool,
        known: Known,
        on_moved: str,
    ):
        self.inner = inner
        self.known = known
        self.configuration = configuration
        self.rules = rules
        self.per_parameter_steps = per_parameter_steps
        self.on_moved = on_moved
        self._eager = jax.jit(self._stream, static_argnames=("traced", "shards"))

    def init(self, params: optax.Params) -> optax.OptState:
        """The state of `inner`, its larger arrays in host memory."""
        made = paired(self._init(bare(params)))
        structure = jax.tree.structure(bare(params))
        if structure == jax.tree.structure(params):
            return made
        own = jax.eval_shape(self.inner.init, params)
        leaves = [
            like(params, x) if jax.tree.structure(x) == structure else x
            for x in jax.tree.structure(bare(own)).flatten_up_to(made)
        ]
        return settled(jax.tree.unflatten(jax.tree.structure(own), leaves))

    def _init(self, params: optax.Params) -> optax.OptState:
        params = _arrays(params)
        paths, leaves = _paths(params)
        for path, leaf in zip(paths, leaves, strict=True):
            _refuse_dtype(path, leaf)
        said = self.known.said_by(paths, leaves)
        shards = self.known.find(paths, leaves)
        closed, shapes = granularity.trace(self.inner.init, params)
        granularity.refuse_effects(closed)
        state_paths, avals = _paths(shapes)
        layout = self.layout(params, shapes, shards)
        owners = parameter_of(state_paths, paths)
        budget = self.configuration.budget(parameters=nbytes(leaves))
        stays = resident(
            layout.sizes(), owners, budget, self.configuration.min_paged_size
        )
        if not all(stays):
            kind = resolve_host_memory_kind(self.configuration.host_memory_kind)
            if kind == PINNED_HOST:
                check_backend()
                _refuse_devices(state_paths, stays, layout.shards)
                stays = self.uncut_stay(layout, state_paths, stays, leaves)
            else:
                stays = [True] * len(stays)
        described = jax.tree.map(granularity.abstract, params)
        if (record := current().record) is not None:
            record(
                self.configuration,
                lambda extra: self.moments(described, shapes, stays, shards, extra),
            )
        analysis = granularity.analyse(
            closed, [None] * len(leaves), [None] * len(avals), str
        )

        def run_leaf(leaf: granularity.LeafUpdate, inputs: list[Any]) -> list[Any]:
            (position,) = leaf.outputs
            codec, divided = layout.codecs[position], layout.shards[position]
            if stays[position] and codec is None and divided is None:
                return leaf.program(inputs)
            made = fill(
                tuple(inputs),
                jnp.zeros(2, jnp.uint32) if codec and codec.draws else None,
                program=leaf.program,
                geometry=self.geometry(
                    leaf,
                    [Kept(avals[position].dtype.itemsize, codec, not stays[position])],
                    divided,
                ),
                dtype=avals[position].dtype,
                codec=codec,
                host=not stays[position],
                shards=divided,
            )
            return [made]

        mesh = next((x.mesh for x in shards if x), None)
        moving = sum(
            size or 0
            for size, stay in zip(layout.sizes(), stays, strict=True)
            if not stay
        )
        shown = moving >= LARGE and not any(isinstance(x, Tracer) for x in leaves)

        def make(leaves: Sequence[Any]) -> list[Any]:
            with progress("moments", len(analysis.leaves), shown) as advance:

                def run_and_tell(leaf: granularity.LeafUpdate, inputs: Any) -> Any:
                    made = run_leaf(leaf, inputs)
                    if shown:
                        jax.block_until_ready(made)
                        advance()
                    return made

                values = analysis.evaluate(leaves, run_and_tell)
            return [
                _place(
                    jnp.asarray(value, aval.dtype) if codec is None else value,
                    not stay,
                    None if owner is None else leaves[owner],
                    None if divided else mesh,
                )
                for value, aval, codec, stay, owner, divided in zip(
                    values,
                    avals,
                    layout.codecs,
                    stays,
                    owners,
                    layout.shards,
                    strict=True,
                )
            ]

        if not any(isinstance(x, Tracer) for x in leaves):
            with without_explicit_axes():
                made = _tied(make(leaves))
            self.known.seen |= said
            return layout.build(made)
        types = [
            layout.types(i, None if owner is None else leaves[owner])
            for i, owner in enumerate(owners)
        ]
        return layout.build(automatically(make, (leaves,), types))

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        active: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Streams the state past the gradients; returns updates and the new state.

        Updates are divided as parameters are, or as gradients without them.
        """
        gradients, held, params = bare(updates), bare(state), bare(params)
        active, extra_args = bare(active), bare(extra_args)
        if current().seen_through:
            layout = self.layout(gradients, held, self.shards(gradients, held, params))
            plain = layout.blank(layout.take_apart(held)[0])
            return self.inner.update(gradients, plain, params, **extra_args)
        made = paired(self._update(gradients, held, params, active, extra_args))
        return like(updates, made[0]), like(state, made[1])

    def _update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        active: Any,
        extra_args: dict[str, Any],
    ) -> tuple[optax.Updates, optax.OptState]:
        _refuse_host("gradient", updates)
        _refuse_host("parameter", params)
        for path, x in zip(*_paths(state), strict=True):
            if mistyped(x):
                self.tell(
                    f"state{_keystr(path)} is in host memory, and has the type of"
                    " device memory, where it is about to go: a restore made it with"
                    " a SingleDeviceSharding. Put"
                )
                break
        if params is not None:
            _refuse_different(updates, params)
        gates = gates_of(active, updates)
        restart = current().restart
        gates = gates and _Gates.of(gates)
        open_gates, gating = _split({"gates": gates, "restart": restart})
        extras, static = _split({"restart": restart, "extra_args": extra_args})
        trees = (_arrays(updates), state, _arrays(params))
        shards = self.shards(*trees)
        # Anew at each call: `inner` may read more than its arguments. What is compiled
        # serves all that compute the same.
        traced, constants = self._trace(*trees, extras, static, gating, shards)
        arguments = (*trees, extras, open_gates, constants)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
            return self._stream(*arguments, traced=traced, shards=shards)
        return self._eager(*arguments, traced=traced, shards=shards)

    def _trace(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extras: list[Any],
        static: "_Static",
        gating: "_Static",
        shards: tuple[Shards | None, ...],
    ) -> tuple["_Traced", dict[int, Any]]:
        """What an update computes, and the arrays that it closes over."""
        layout = self.layout(updates, state, shards)
        try:
            leaves, own = layout.take_apart(state)
        except OtherLayoutError:
            raise
        except ValueError as error:
            _refuse_state(self.inner, updates, state, error)
            raise
        seen = layout.seen(leaves)
        analysis, structure = self.analyse(updates, seen, params, extras, static)
        first = len(jax.tree.leaves(updates))
        _refuse_own_steps(analysis, {first + p: x for p, x in own.items()}, seen, first)
        constants = dict(analysis.constants)
        analysis = dataclasses.replace(analysis, constants={})
        return _Traced(analysis, structure, gating), constants

    def _stream(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        *others: Any,
        traced: "_Traced",
        shards: tuple[Shards | None, ...],
    ) -> tuple[optax.Updates, optax.OptState]:
        run = functools.partial(self._stream_here, traced=traced, shards=shards)
        results = (updates if params is None else params, state)
        return automatically(run, (updates, state, params, *others), results)

    def _stream_here(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extras: list[Any],
        open_gates: list[Any],
        constants: dict[int, Any],
        *,
        traced: "_Traced",
        shards: tuple[Shards | None, ...],
    ) -> tuple[optax.Updates, optax.OptState]:
        gradients = jax.tree.leaves(updates)
        layout = self.layout(updates, state, shards)
        leaves, own = layout.take_apart(state)
        analysis = dataclasses.replace(traced.analysis, constants=constants)
        self.warn_of_moved(layout, leaves)
        first = len(gradients)  # of the state's leaves, among arguments and results
        arguments = [*gradients, *leaves, *jax.tree.leaves((params, extras))]
        codecs = {i: codec for i, codec in enumerate(layout.codecs, first) if codec}
        own = {first + position: each for position, each in own.items()}
        if any(map(on_host, arguments)):
            check_backend()
        given = traced.gating.merge(open_gates)
        gates = given["gates"].each() if given["gates"] else [True] * len(gradients)
        # A moment starts again where its parameter's update is skipped, too.
        moves = [either([gate, given["restart"]]) for gate in gates]
        gate_of_all = either(moves) if gradients else True
        gate_of = lambda owner: gate_of_all if owner is None else moves[owner]
        streamed: set[int] = set()

        def run_leaf(leaf: granularity.LeafUpdate, inputs: list[Any]) -> Sequence[Any]:
            gate = gate_of(leaf.owner)
            if leaf.owner is None and len({id(gate) for gate in gates}) > 1:
                _refuse_joined(leaf)
            olds = [arguments[p] if p >= 0 else None for p in leaf.outputs]
            if gate is False:
                return [
                    jnp.zeros(new.shape, new.dtype) if p < first else old
                    for p, old, new in zip(leaf.outputs, olds, leaf.avals, strict=True)
                ]
            buffers, numbers = list(inputs), list(leaf.inputs)
            overwrites: list[int] = []
            for p, old, new in zip(leaf.outputs, olds, leaf.avals, strict=True):
                if p not in codecs and (
                    old is None or (old.shape, old.dtype) != (new.shape, new.dtype)
                ):
                    # An update of another dtype than its gradient, say, cannot take
                    # over its buffer.
                    old = jnp.zeros(new.shape, new.dtype)
                elif p in leaf.inputs:
                    # By its number: one array may be given for several moments.
                    overwrites.append(leaf.inputs.index(p))
                    continue
                overwrites.append(len(buffers))
                buffers.append(old)
                numbers.append(p)
            coded = [codecs.get(number) for number in numbers]
            moving = [
                Kept(4 if codec else x.dtype.itemsize, codec, on_host(x))
                for x, codec in zip(buffers, coded, strict=True)
                if codec is not None or on_host(x)
            ]
            divided = _divided(leaf, gradients, shards)
            if not moving:
                return leaf.program(inputs)
            streamed.update(leaf.outputs)
            run = functools.partial(
                stream,
                program=leaf.program,
                overwrites=tuple(overwrites),
                geometry=self.geometry(leaf, moving, divided),
                codecs=tuple(coded),
                shapes=tuple(
                    layout.avals[number - first].shape if codec else x.shape
                    for number, codec, x in zip(numbers, coded, buffers, strict=True)
                ),
                shards=divided,
            )
            alone = divided is None and leaf.program.elementwise
            with jax.named_scope(UNSHARDED) if alone else contextlib.nullcontext():
                return run(
                    _underived(buffers) if any(map(on_host, buffers)) else (*buffers,),
                    None if gate is True else gate.astype(jnp.int32),
                    _noise(leaves, leaf.outputs, [coded[i] for i in overwrites]),
                )

        results = analysis.evaluate(arguments, run_leaf, own)
        for position, new in enumerate(results):
            if position < first:
                results[position] = _choose(gates[position], new, None)
                continue
            old = arguments[position]
            if position in own:
                # One value: shared by all, or that of a single parameter's leaf.
                each = new if isinstance(new, list) else [new] * len(gates)
                chosen = map(_choose, moves, each, own[position])
                results[position] = jax.tree.unflatten(layout.parameters, chosen)
            elif position not in streamed and new is not old:
                gate = gate_of(analysis.owners[position])
                results[position] = _choose(gate, new, old)
                if on_host(old) and not on_host(results[position]):
                    # Handed through, or shared by all: where the old value lives.
                    results[position] = jax.device_put(results[position], HOST)
        return jax.tree.unflatten(traced.structure, results)

    def warn_of_moved(self, layout: Layout, leaves: Sequence[Any]) -> None:
        """Reports moments on the device that the budget has no room for."""
        budget = self.configuration.device_budget
        if not isinstance(budget, int) or current().fetched:
            return
        if resolve_host_memory_kind(self.configuration.host_memory_kind) != PINNED_HOST:
            return
        paths, _ = _paths(jax.tree.unflatten(layout.structure, range(len(leaves))))
        moved = [
            (path, size)
            for path, x, size in zip(paths, leaves, layout.sizes(), strict=True)
            if size is not None
            and size >= self.configuration.min_paged_size
            and not on_host(x)
        ]
        total = sum(size for _, size in moved)
        if total > budget:
            self.tell(
                f"{len(moved)} moments of {readable_bytes(total)} are in device memory,"
                f" state{_keystr(moved[0][0])} first, and device_budget="
                f"{readable_bytes(budget)} leaves them no room: a jax.device_put, a"
                " restore or out_shardings without a memory kind moved them. If"
                " they are to stay, pass device_budget=None; if not, put"
            )

    def tell(self, what: str) -> None:
        """Warns of moments that are not where they belong, or refuses them."""
        message = (
            f"{what} the state back by paged_optax.place_state(tx, state, params)."
            " paged(..., on_moved='raise') makes this an error, and 'warn' a warning."
        )
        if self.on_moved == "raise":
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)

    def shards(
        self, updates: Any, state: Any, params: Any
    ) -> tuple[Shards | None, ...]:
        """How each parameter's moments are divided: so they stay.

        A parameter says it of moments that a codec stores, and a gradient where there
        is no parameter.
        """
        paths, gradients = _paths(updates)
        divided = jax.tree.leaves(params) or gradients
        state_paths, leaves = _paths(state)
        owners = parameter_of(state_paths, paths)
        own = {
            i: x
            for i, x in zip(owners, leaves, strict=True)
            if i is not None and x.shape == gradients[i].shape
        }
        moments = [own.get(i, x) for i, x in enumerate(divided)]
        return self.known.find(paths, moments, divided, gradients)

    def layout(
        self, params: Any, state: Any, shards: Sequence[Shards | None]
    ) -> Layout:
        """The layout of a state of `inner`, or of one made by `init`."""
        shapes = state
        if self.rules or self.per_parameter_steps:
            shapes = jax.eval_shape(
                self.inner.init, jax.tree.map(granularity.abstract, params)
            )
        paths, avals = _paths(shapes)
        parameter_paths, parameters = _paths(params)
        owners = parameter_of(paths, parameter_paths)
        divided = [
            None if i is None or x.shape != parameters[i].shape else shards[i]
            for i, x in zip(owners, avals, strict=True)
        ]
        return Layout.of(
            shapes,
            choose(self.rules, paths, avals, parameter_paths),
            params,
            divided,
            per_parameter_steps=self.per_parameter_steps,
        )

    def uncut_stay(
        self,
        layout: Layout,
        paths: Sequence[Any],
        stays: Sequence[bool],
        parameters: Sequence[Any],
    ) -> list[bool]:
        """Keeps what a TPU cannot slice in host memory on the device, and says so."""
        if memory.platform() != "tpu":
            return list(stays)
        refused = {
            position: reason
            for position, stay in enumerate(stays)
            if not stay and (reason := self._refused(layout, position))
        }
        if refused and not any(isinstance(x, Tracer) for x in parameters):
            first, reason = next(iter(refused.items()))
            warnings.warn(
                f"state{_keystr(paths[first])} and {len(refused) - 1} other moments"
                f" stay in device memory: {reason}. The README says which shapes can"
                " be paged on a TPU.",
                stacklevel=3,
            )
        return [stay or i in refused for i, stay in enumerate(stays)]

    def _refused(self, layout: Layout, position: int) -> str:
        """Why a TPU cannot slice a moment in host memory; else empty."""
        aval, shards = layout.avals[position], layout.shards[position]
        shape = shards.local(aval.shape) if shards else aval.shape
        kept = Kept(aval.dtype.itemsize, layout.codecs[position])
        return cut(shape, (kept,), self.configuration.page_size).tiles.refused

    def geometry(
        self,
        leaf: granularity.LeafUpdate,
        moments: Sequence[Kept],
        shards: Shards | None = None,
    ) -> Geometry:
        """How a leaf is cut, given its moments that travel or are coded."""
        shape = shards.local(leaf.shape) if shards else leaf.shape
        if not leaf.program.elementwise or not moments:
            return uncut(shape)
        return cut(shape, tuple(moments), self.configuration.page_size)

    def analyse(
        self,
        updates: Any,
        state: Any,
        params: Any,
        arrays: list[Any],
        static: "_Static",
    ) -> tuple[granularity.Analysis, Any]:
        """Traces `inner.update` once and takes it apart.

        Returns:
          The analysis, and the structure of what `update` returns.
        """

        def function(updates, state, params, arrays):
            given = static.merge(arrays)
            result = self.inner.update(updates, state, params, **given["extra_args"])
            if given.get("restart", False) is False:
                return result
            first = self.inner.init(updates if params is None else params)
            restarted = lambda first, new: jnp.where(given["restart"], first, new)
            return result[0], jax.tree.map(
                lambda first, new: restarted(first, new).astype(jnp.asarray(new).dtype),
                first,
                result[1],
            )

        paths, gradients = _paths(updates)
        try:
            closed, shapes = granularity.trace(function, updates, state, params, arrays)
        except (TypeError, ValueError) as error:
            _refuse_state(self.inner, updates, state, error)
            raise
        granularity.refuse_effects(closed)
        _refuse_changes(shapes, updates, state)
        own = range(len(gradients))
        by_place = parameter_of(_paths(state)[0], paths)
        parameters = range(len(jax.tree.leaves(params)))
        unknown = [None] * len(by_place)
        analysis = granularity.analyse(
            closed,
            [*own, *unknown, *parameters, *[None] * len(arrays)],
            [*own, *by_place],
            lambda i: f"parameter {_keystr(paths[i])}",
            range(len(closed.out_avals)),
        )
        return analysis, jax.tree.structure(shapes)

    def moments(
        self,
        params: Any,
        shapes: Any,
        stays: Sequence[bool],
        shards: Sequence[Shards | None],
        extra: dict[str, Any],
    ) -> list[Moment]:
        """What `init` places where, and how `update` will cut it, for `plan`."""
        layout = self.layout(params, shapes, shards)
        analysis, _ = self.analyse(
            params, shapes, params, *_split({"extra_args": extra})
        )
        first = len(jax.tree.leaves(params))
        state_paths, avals = _paths(shapes)
        geometry: dict[int, tuple[int, Pages]] = {}
        platform = memory.platform()
        for number, leaf in enumerate(analysis.leaves):
            inside = {i - first for i in (*leaf.inputs, *leaf.outputs)}
            inside = sorted(i for i in inside if 0 <= i < len(avals))
            inside = [i for i in inside if not stays[i] or layout.codecs[i]]
            divided = _divided(leaf, jax.tree.leaves(params), shards)
            kept = [
                Kept(avals[i].dtype.itemsize, layout.codecs[i], not stays[i])
                for i in inside
            ]
            pages = self.geometry(leaf, kept, divided).on(platform)
            geometry.update((i, (number, pages)) for i in inside)
        found = []
        for i, (path, x) in enumerate(zip(state_paths, avals, strict=True)):
            alone = len(analysis.leaves) + i, uncut(x.shape).rows
            number, pages = geometry.get(i, alone)
            codec, part = layout.codecs[i], layout.shards[i]
            shape = part.local(x.shape) if part else x.shape
            page = pages.entries * x.dtype.itemsize if pages.count else nbytes(x)
            stored = Streamed.of(layout.stored(i), pages, codec, on_host=True)
            scales = None if part or stays[i] else stored.scales
            reason = pages.refused
            if platform == "tpu" and codec is not None and stays[i] and not reason:
                reason = self._refused(layout, i)
            found.append(
                Moment(
                    path=_keystr(path),
                    shape=shape,
                    dtype=str(x.dtype if codec is None else codec),
                    bytes=nbytes(layout.stored(i)) // layout.parts(i),
                    on_host=not stays[i],
                    pages=0 if stays[i] else max(1, pages.count),
                    page_bytes=0 if stays[i] else page,
                    leaf=number,
                    in_flight=2 if codec is None and pages.count else 3,
                    beside=scales.nbytes if scales and not scales.travels else 0,
                    refused=reason,
                )
            )
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Gates:
    """The gates of all gradients, each once.

    Passed one for each gradient, one tracer for all of them would become as many that
    are not known to be equal.

    Attributes:
      distinct: The gates.
      number: For each gradient the number of its gate.
    """

    distinct: list[Gate]
    number: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, gates: Sequence[Gate]) -> "_Gates":
        distinct = {id(gate): gate for gate in gates}
        positions = list(distinct)
        numbers = tuple(positions.index(id(gate)) for gate in gates)
        return cls(list(distinct.values()), numbers)

    def each(self) -> list[Gate]:
        return [self.distinct[i] for i in self.number]


@dataclasses.dataclass(frozen=True)
class _Static:
    """What of a tree is no array, and where the arrays among it go."""

    treedef: Any
    is_array: tuple[bool, ...]
    rest: tuple[Any, ...]

    def merge(self, arrays: Sequence[Any]) -> Any:
        array, rest = iter(arrays), iter(self.rest)
        leaves = [next(array) if yes else next(rest) for yes in self.is_array]
        return jax.tree.unflatten(self.treedef, leaves)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """An update as a value: two that compute the same are equal.

    Attributes:
      analysis: Its programs, without the arrays closed over.
      structure: The structure of what it returns.
      gating: Its gates and its restart, but for those known on the device alone.
    """

    analysis: granularity.Analysis
    structure: Any
    gating: _Static


def _split(tree: Any) -> tuple[list[Any], _Static]:
    """Takes the arrays and numbers of a tree apart from the rest."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)
    numbers = (int, float, complex)  # a new value must not mean a new compilation
    is_array = [
        isinstance(x, (*kinds, *numbers)) and not isinstance(x, bool) for x in leaves
    ]
    arrays = [x for x, yes in zip(leaves, is_array, strict=True) if yes]
    rest = tuple(x for x, yes in zip(leaves, is_array, strict=True) if not yes)
    return arrays, _Static(treedef, tuple(is_array), rest)


def _arrays(tree: Any) -> Any:
    """Python numbers and NumPy arrays as JAX arrays."""

    def array(path: Any, x: Any) -> Any:
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            return x
        try:
            return jnp.asarray(x)
        except TypeError as error:
            raise TypeError(
                f"leaf {_keystr(path)} is of type {type(x).__name__}: parameters and"
                " gradients are trees of arrays."
            ) from error

    return jax.tree_util.tree_map_with_path(array, tree)


def _paths(tree: Any) -> tuple[list[jax.tree_util.KeyPath], list[Any]]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [path for path, _ in flat], [leaf for _, leaf in flat]


def _choose(gate: Gate, new: Any, old: Any) -> Any:
    """The new value where a gate is open; else the old one, or zero without one."""
    if gate is True:
        return new
    old = jnp.zeros_like(new) if old is None else old
    if gate is False:
        return old
    return jnp.where(gate, new, jax.device_put(old, DEVICE) if on_host(old) else old)


def _divided(
    leaf: granularity.LeafUpdate,
    parameters: Sequence[Any],
    shards: Sequence[Shards | None],
) -> Shards | None:
    """How a leaf is divided: as its parameter, where it is one value by value."""
    if leaf.owner is None or not leaf.program.elementwise:
        return None
    return shards[leaf.owner] if leaf.shape == parameters[leaf.owner].shape else None


def _place(value: Any, host: bool, like: Any, mesh: Any) -> Any:
    """Puts one leaf of a new state beside its parameter, in its own memory.

    What is not divided as its parameter is on all devices of the mesh, if there is one.
    """

    def place(x: Array) -> Array:
        sharding = None
        if isinstance(x, Tracer) or isinstance(like, Tracer):
            pass  # its type says where it is
        elif getattr(like, "committed", False) and like.shape == x.shape:
            sharding = like.sharding
        elif isinstance(mesh, Mesh):
            sharding = NamedSharding(mesh, PartitionSpec())
        if sharding is not None:
            if host:
                sharding = sharding.with_memory_kind(PINNED_HOST)
            return jax.device_put(x, sharding)
        return jax.device_put(x, HOST) if host and not on_host(x) else x

    return jax.tree.map(place, value)


def _tied(values: list[Any]) -> list[Any]:
    """Commits a new state to the device of its host arrays, where it has some.

    What a program with host arrays returns is committed, and `jax.jit` would compile
    the next step again for a count that was not.
    """
    devices = {d for x in jax.tree.leaves(values) if on_host(x) for d in x.devices()}
    if len(devices) != 1:
        return values
    (place,) = map(SingleDeviceSharding, devices)
    tie = lambda x: x if x.committed else jax.device_put(x, place)
    return jax.tree.map(tie, values)


def _noise(
    leaves: Sequence[Any], outputs: Sequence[int], codecs: Sequence[Codec | None]
) -> tuple[Any, ...] | None:
    """The random words by which results are rounded: of this moment, at this step."""
    if not any(codec is not None and codec.draws for codec in codecs):
        return None
    step = leaves[0]  # the first field of the state of `precision.counted`
    layer = current().layer

    def words(position: int, codec: Codec) -> Array:
        key = jax.random.key(getattr(codec, "seed", 0))
        if layer is not None:
            key = jax.random.fold_in(key, layer)
        return draw(jax.random.fold_in(key, position), step).words

    return tuple(
        words(position, codec) if codec is not None and codec.draws else None
        for position, codec in zip(outputs, codecs, strict=True)
    )


def _refuse_dtype(path: Any, leaf: Any) -> None:
    dtype = jax.typeof(leaf).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"parameter {_keystr(path)} has dtype {dtype}: only floating point and"
            " complex parameters have moments. Leave it out with"
            " optax.masked(paged(...), mask), or optax.partition."
        )


def _refuse_devices(
    paths: Sequence[Any], stays: Sequence[bool], shards: Sequence[Shards | None]
) -> None:
    """A parameter's mesh need not be of the default backend's devices."""
    for path, stay, divided in zip(paths, stays, shards, strict=True):
        if stay or divided is None or not isinstance(divided.mesh, Mesh):
            continue
        device = next(iter(divided.mesh.local_devices), None)
        if device is not None and PINNED_HOST not in (kinds := memory_kinds(device)):
            raise ValueError(
                f"state{_keystr(path)} is to be paged by the devices of {divided.mesh},"
                f" and {device} has only {', '.join(kinds)}: use a mesh of devices with"
                f" {PINNED_HOST} memory, or device_budget=None to keep the moments on"
                " these."
            )


def _refuse_host(what: str, tree: Any) -> None:
    for path, leaf in zip(*_paths(tree), strict=True):
        if on_host(leaf):
            raise ValueError(
                f"{what} {_keystr(path)} is in host memory ({jax.typeof(leaf)}): only"
                " moments belong there. A jax.jit that holds no update, and is given"
                " donated moments, can return anything of their shape in their place:"
                " use paged_optax.jit_step, or state out_shardings. To mend an array,"
                " use jax.device_put(x, jax.memory.Space.Device)."
            )


def _underived(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The same arrays, through which nobody may take a derivative, nor `vmap`."""
    leaves, structure = jax.tree.flatten(tuple(arrays))
    inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    numbers = (x for x, yes in zip(leaves, inexact, strict=True) if yes)
    same = iter(_refuse_derivatives(*numbers))
    leaves = [next(same) if yes else x for x, yes in zip(leaves, inexact, strict=True)]
    return jax.tree.unflatten(structure, leaves)


@jax.custom_batching.custom_vmap
def _refuse_batches(*numbers: Array) -> tuple[Array, ...]:
    return numbers


@_refuse_batches.def_vmap
def _(*_: Any) -> Any:
    raise ValueError(
        "update has moments in host memory, and is called within jax.vmap, which would"
        " gather pages there. Call init and update on the stacked parameters, without"
        " vmap: what works element by element has the same numbers; else use"
        " device_budget=None."
    )


@jax.custom_jvp
def _refuse_derivatives(*numbers: Array) -> tuple[Array, ...]:
    return tuple(_refuse_batches(*numbers))


@_refuse_derivatives.defjvp
def _(*_: Any) -> Any:
    raise ValueError(
        "update has moments in host memory, through which JAX takes no derivative. To"
        " differentiate it use the transformation without paging, or"
        " device_budget=None, for init and update; else call update on"
        " jax.lax.stop_gradient(...) of what is differentiated."
    )


def _refuse_different(updates: Any, params: Any) -> None:
    update_paths, update_leaves = _paths(updates)
    parameter_paths, parameter_leaves = _paths(params)
    if jax.tree.structure(updates) != jax.tree.structure(params):
        here, there = set(map(tuple, update_paths)), set(map(tuple, parameter_paths))
        odd = sorted(map(_keystr, here ^ there)) or ["(another container type)"]
        raise ValueError(
            "the gradients' structure differs from the parameters' at"
            f" {', '.join(odd[:3])}: pass gradients taken of these parameters."
        )
    for path, update, parameter in zip(
        update_paths, update_leaves, parameter_leaves, strict=True
    ):
        if np.shape(update) != np.shape(parameter):
            raise ValueError(
                f"gradient {_keystr(path)} has shape {np.shape(update)}, its parameter"
                f" {np.shape(parameter)}: pass gradients taken of these parameters."
            )


def _refuse_state(
    inner: optax.GradientTransformation, updates: Any, state: Any, error: Exception
) -> None:
    """Names the leaf in which a state is not the one these gradients call for."""
    try:
        wanted = jax.eval_shape(inner.init, jax.tree.map(granularity.abstract, updates))
    except Exception:
        return  # the gradients are no parameters: the first error says more
    here, there = (
        dict(zip(*_paths(state), strict=True)),
        dict(zip(*_paths(wanted), strict=True)),
    )
    odd = [
        _keystr(path) for path in (*here, *there) if (path in here) != (path in there)
    ]
    if odd:
        raise ValueError(
            "the state's structure is not the one these gradients call for: they differ"
            f" at state{', state'.join(odd[:3])}. Pass the state that init made for"
            " these parameters."
        ) from error
    for path, leaf in here.items():
        if leaf.shape != there[path].shape:
            raise ValueError(
                f"state{_keystr(path)} has shape {leaf.shape}, and these gradients call"
                f" for {there[path].shape}: pass the state that init made for these"
                " parameters."
            ) from error


def _refuse_own_steps(
    analysis: granularity.Analysis, own: Any, state: Any, gradients: int
) -> None:
    """Names what all parameters share although it follows from their step counts."""
    if not own:
        return
    reached = analysis.reached_from(own)
    shared = [p for p, x in analysis.direct if x in reached and p not in own]
    for leaf in analysis.leaves:
        if gradients > 1:  # a count that follows from one gradient is not each one's
            shared += own.keys() & leaf.outputs
    for leaf in analysis.leaves:
        if leaf.owner is None and reached.intersection(leaf.inputs):
            shared += leaf.outputs
    if shared:
        path = _paths(state)[0][max(0, shared[0] - gradients)]
        raise ValueError(
            f"per_parameter_steps=True, but state{_keystr(path)} is one value for all"
            " parameters and is computed from their step counts: put what keeps it"
            " (optax.inject_hyperparams, optax.flatten) around paged(...)."
        )


def _refuse_joined(leaf: granularity.LeafUpdate) -> None:
    if any(position < 0 for position in leaf.outputs):
        raise ValueError(
            "active=... differs between parameters that inner lays end to end: pass one"
            " bool for all, or leave optax.flatten out of paged(...)."
        )


def _refuse_changes(shapes: Any, updates: Any, state: Any) -> None:
    new_updates, new_state = shapes
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        raise ValueError(
            "inner.update returned a state of another structure than it was given:"
            " pass the state that init made for these parameters."
        )
    for what, old, new in (
        ("update", updates, new_updates),
        ("state", state, new_state),
    ):
        for path, before, after in zip(*_paths(old), jax.tree.leaves(new), strict=True):
            same_dtype = what == "update" or before.dtype == after.dtype
            if np.shape(before) != after.shape or not same_dtype:
                raise ValueError(
                    f"{what} {_keystr(path)} would turn from {jax.typeof(before)} into"
                    f" {after.dtype}{list(after.shape)}, and could not stay in its own"
                    " buffer: pass gradients of the shapes and dtypes that the state"
                    " was made for."
                )
