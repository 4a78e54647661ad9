"""A training step whose backward pass handles one layer at a time."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, Int

from paged_optax.memory import DEVICE, HOST, on_host
from paged_optax.sharding import automatically
from paged_optax.workspace.applied import Applied
from paged_optax.workspace.parts import Parts
from paged_optax.workspace.stacks import (
    FETCHES_AHEAD,
    downwards,
    goes_in_slabs,
    kept,
    put,
    slab,
    upwards,
)
from paged_optax.workspace.workspace import GradientWorkspace, length_of

#: Everything the step is about, by name: a pytree of parameters, of a batch.
Tree = Any


class LayerwiseOutput(NamedTuple):
    """What a step says of itself.

    Attributes:
      loss: The loss, averaged over micro-batches.
      metrics: What `epilogue` returned beside it, or None; of each micro-batch.
      gradient_norm: The global norm of the gradients, before any clipping.
    """

    loss: Float[Array, ""]
    metrics: Any
    gradient_norm: Float[Array, ""]


def layerwise_step(
    prologue: Callable[[Tree, Tree], tuple[Any, Any]],
    layer: Callable[[Tree, Any, Any, Int[Array, ""]], tuple[Any, Any]],
    epilogue: Callable[[Tree, Any, Any, Tree], Any],
    tx: optax.GradientTransformation,
    *,
    max_norm: float | None = None,
    clip: Literal["global", "layer"] = "global",
    accumulate: bool = False,
    activations_on_host: bool = False,
) -> Callable[..., Any]:
    r"""A training step with the gradients of one layer alive, instead of all.

    Forward over the layers, which saves each one's input; then, from the last layer to
    the first, the layer's VJP into the workspace and its update:

    .. math::
        g_i, \bar x_{i} = \mathrm{vjp}_i(\bar x_{i+1}), \qquad
        \theta_i, s_i \leftarrow \mathrm{tx}(g_i, s_i, \theta_i),
        \qquad i = L-1, \ldots, 0.

    The moments of a layer travel while its VJP computes. Parameters and state are those
    of an ordinary step; so are the numbers, to the rounding of sums in another order.

    The parameters are a mapping with the key `"layers"`, the layers' parameters stacked
    on the leading axis of each leaf (as `nnx.vmap`, `nnx.scan`, Linen's `nn.scan` and
    `jax.vmap` of an initialiser give them), and whatever else the model has. What else
    there is goes to prologue and epilogue alike, so that embeddings may be tied.
    Stacks in host memory stay there, and each layer's weights are fetched for its
    forward and its backward pass, while the layer before computes (jax >= 0.11.2;
    before, while its own other parts do).

    What one layer needs of `tx` must be element by element: `paged_adamw` and its like,
    chained, masked, scheduled. Clip by `max_norm` here, not in `tx`.

    | clipping by the global norm | device bytes | over the link | passes | time |
    | --- | --- | --- | --- | --- |
    | workspace with `host_dtype` | one layer's gradients | gradients, twice | 1 | 1.0 |
    | workspace without | one layer's gradients | nothing more | 2 | 1.5 |

    Passes are backward passes. Times are to a step that does not clip: on a CPU, whose
    link is its memory, jax 0.10.2, 8 layers of 1024 (`tests/benchmarks/run.py`, section
    "layerwise"); on a GPU, not measured.

    Args:
      prologue: `prologue(rest, batch)` returns the first layer's input, and anything
        that all layers may see (masks, rotary tables, dropout keys; stacked tables to
        be indexed by layer), or None. `rest` is the parameters without `"layers"`, by
        name; it is trained through the context too.
      layer: `layer(weights, x, context, i)` returns the next layer's input, and
        anything to keep of this layer (a balancing loss), or None. `i` is the layer's
        number, to fold into keys. Wrap in `jax.checkpoint` what it should compute again
        within its own backward pass.
      epilogue: `epilogue(rest, x, kept, batch)` returns the loss, or the loss and
        metrics. `kept` has what the layers kept, stacked.
      tx: The transformation of the whole tree of parameters, with `paged(...)` inside
        or without.
      max_norm: The norm that gradients are scaled down to; None: no clipping.
      clip: The norm of what: `"global"` is `optax.clip_by_global_norm`, exactly;
        `"layer"` clips each layer, and the rest, by its own norm, which costs nothing.
      accumulate: Whether `batch` is several micro-batches, stacked on the leading axis
        of its leaves; the step is that of the mean of their losses. Layer by layer, all
        micro-batches' inputs are kept and each layer's gradients add up in the
        workspace; with a workspace's `host_dtype` they add up on the host, one
        micro-batch after the other.
      activations_on_host: Whether the layers' inputs wait in host memory.

    Returns:
      `step(params, state, workspace, batch)`, which returns the new parameters, state
      and workspace, and a `LayerwiseOutput`. Compile it with `jit_step`, or `jax.jit`,
      and donate the first three.

    Raises:
      ValueError: When traced, if `tx` needs several elements of a layer, if the
        workspace is of another model, or if the layers are not stacked alike.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"layers": {"kernel": jnp.full((3, 64, 64), 0.01)}}
      >>> step = po.layerwise_step(
      ...     lambda rest, batch: (batch, None),
      ...     lambda weights, x, context, i: (x + x @ weights["kernel"], None),
      ...     lambda rest, x, kept, batch: jnp.mean((x - 1.0) ** 2),
      ...     tx := po.paged_adamw(1e-2),
      ...     max_norm=1.0,
      ... )
      >>> workspace = po.GradientWorkspace.allocate(params["layers"])
      >>> args = params, tx.init(params), workspace, jnp.ones((8, 64))
      >>> step = po.jit_step(step, *args, donate_argnums=(0, 1, 2))
      >>> params, state, workspace, output = step(*args)
      >>> workspace.gradients["kernel"].shape, bool(output.gradient_norm > 0)
      ((64, 64), True)

    References:
      Lv et al., `Full Parameter Fine-tuning for Large Language Models with Limited
      Resources <https://arxiv.org/abs/2306.09782>`_, 2023 (LOMO), which clips by two
      backward passes.
    """
    if clip not in ("global", "layer"):
        raise ValueError(f"clip={clip!r} is neither 'global' nor 'layer'.")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} is not positive: pass None not to clip.")
    model = _Model(prologue, layer, epilogue, activations_on_host)

    def step(
        params: Tree, state: optax.OptState, workspace: GradientWorkspace, batch: Tree
    ) -> tuple[Tree, optax.OptState, GradientWorkspace, LayerwiseOutput]:
        given = params, state, workspace, batch
        return automatically(run, given, (params, state, workspace, None))

    def run(
        params: Tree, state: optax.OptState, workspace: GradientWorkspace, batch: Tree
    ) -> tuple[Tree, optax.OptState, GradientWorkspace, LayerwiseOutput]:
        parts = Parts.of(params)
        _refuse_integers(params)
        if accumulate:
            _refuse_other_counts(batch)
        workspace.check(parts.layers)
        applied = Applied(tx, params, parts, state, workspace.gradients)
        norms = _Norms(max_norm, clip, _widest(parts.rest, workspace.gradients))
        return _Run(model, parts, applied, norms, accumulate)(workspace, batch)

    return step


@dataclasses.dataclass(frozen=True)
class _Norms:
    """How gradients are measured and clipped.

    Attributes:
      max_norm: The norm they are scaled down to, or None.
      clip: The norm of what.
      dtype: What squares are added up in. They go from float32's largest number at a
        norm of 2e19, and from float16's at 256.
    """

    max_norm: float | None
    clip: str
    dtype: np.dtype

    @property
    def needed_first(self) -> bool:
        """Whether all gradients are needed before the first may be used."""
        return self.max_norm is not None and self.clip == "global"

    @property
    def zero(self) -> Float[Array, ""]:
        """The square of no gradient's norm."""
        return jnp.zeros((), self.dtype)

    def square(self, tree: Any) -> Float[Array, ""]:
        """The square of a tree's norm."""
        wide = lambda x: x.astype(np.promote_types(x.dtype, self.dtype))
        found = optax.tree.norm(jax.tree.map(wide, tree), squared=True)
        return found.astype(self.dtype)

    def scaled(self, gradients: Any, norm: Float[Array, ""]) -> Any:
        """Optax's own formula, so that numbers agree to the last bit."""
        limit = self.max_norm
        if limit is None:
            return gradients
        return jax.tree.map(
            lambda g: jnp.where(norm < limit, g, g / norm.astype(g.dtype) * limit),
            gradients,
        )


@dataclasses.dataclass(frozen=True)
class _Model:
    """The user's three functions."""

    prologue: Callable[..., Any]
    layer: Callable[..., Any]
    epilogue: Callable[..., Any]
    activations_on_host: bool

    def enter(self, rest: Any, batch: Any) -> tuple[Any, Any]:
        """The first layer's input, and the context."""
        x, context = self.prologue(rest, batch)
        return jax.tree.map(jnp.asarray, x), context

    def through(self, *arguments: Any) -> tuple[Any, Any]:
        """One layer's output, and what it keeps."""
        return jax.tree.map(jnp.asarray, self.layer(*arguments))

    def forward(
        self, weights: "_Weights", rest: Any, batch: Any, each: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Runs prologue and layers.

        Returns:
          The last layer's output, every layer's input, what the layers kept, what they
          all see, and the stacks.
        """
        x, context = each(lambda b: self.enter(rest, b), batch)
        length = weights.length
        run = lambda i, slabs, x: each(
            lambda x, c: self.through(weights.of(slabs), x, c, i), x, context
        )
        shapes = jax.eval_shape(
            lambda stacks, x: run(jnp.int32(0), weights.slabs(stacks, 0), x),
            weights.stacks,
            x,
        )
        _refuse_other_input(x, shapes[0])
        blank = lambda x: lax.empty((length, *x.shape), x.dtype)
        inputs = jax.tree.map(blank, x)
        if self.activations_on_host:
            inputs = jax.device_put(inputs, HOST)
        keep = jax.tree.map(blank, shapes[1])

        def body(i: Any, following: Any, carry: Any) -> Any:
            x, inputs, keep, stacks, ahead = carry
            stacks, slabs = kept(stacks, weights.slabs(stacks, i, ahead), i)
            ahead = weights.fetched(stacks, following)
            inputs = jax.tree.map(lambda to, x: put(to, x[None], i), inputs, x)
            x, made = run(i, slabs, x)
            keep = jax.tree.map(lambda to, x: put(to, x[None], i), keep, made)
            return x, inputs, keep, stacks, ahead

        ahead = weights.fetched(weights.stacks, 0)
        x, inputs, keep, stacks, _ = upwards(
            length,
            body,
            (x, inputs, keep, weights.stacks, ahead),
            ahead=weights.ahead,
        )
        return x, inputs, keep, context, stacks

    def head(self, rest: Any, x: Any, keep: Any, batch: Any) -> tuple[Any, ...]:
        """The loss of one micro-batch, its metrics, and the gradients.

        Returns:
          Loss, metrics, and the gradients by `rest` and by what is differentiable of
          `x` and of what the layers kept.
        """
        inputs, merge_x = _inexact(x)
        floats, merge_kept = _inexact(keep)

        def loss(rest: Any, inputs: Any, floats: Any) -> Any:
            result = self.epilogue(rest, merge_x(inputs), merge_kept(floats), batch)
            return result if isinstance(result, tuple) else (result, None)

        (value, metrics), gradients = jax.value_and_grad(
            loss, argnums=(0, 1, 2), has_aux=True
        )(rest, inputs, floats)
        return value, metrics, *gradients

    def pull(
        self,
        weights: Any,
        x: Any,
        context: Any,
        learned: Sequence[bool],
        i: Any,
        dx: Any,
        dkept: Any,
    ) -> tuple[Any, Any, Any]:
        """One layer's gradients by its weights, its input, and the learned context."""
        inputs, merge_x = _inexact(x)
        seen, merge_context = _parted(context, learned)

        def run(weights: Any, inputs: Any, seen: Any) -> Any:
            x, made = self.through(weights, merge_x(inputs), merge_context(seen), i)
            return _inexact(x)[0], _inexact(made)[0]

        return jax.vjp(run, weights, inputs, seen)[1]((dx, dkept))

    def first(self, rest: Any, batch: Any, learned: Sequence[bool], back: Any) -> Any:
        """The prologue's gradients by `rest`."""

        def run(rest: Any) -> Any:
            x, context = self.enter(rest, batch)
            return _inexact(x)[0], _parted(context, learned)[0]

        return jax.vjp(run, rest)[1](back)[0]

    def learned(self, rest: Any, batch: Any) -> list[bool]:
        """Which leaves of the context follow from the parameters.

        Nobody takes the gradients of the others: those of a table would be one more
        buffer of its size, added to by each layer.
        """
        found: list[bool] = []

        def watched(number: int, x: Any) -> Any:
            @jax.custom_vjp
            def watch(x: Any) -> Any:
                return x

            def forward(x: Any) -> Any:
                found[number] = x.perturbed
                return x.value, None

            watch.defvjp(forward, lambda _, dx: (dx,), symbolic_zeros=True)
            return watch(x)

        def run(rest: Any) -> Any:
            leaves = jax.tree.leaves(self.enter(rest, batch)[1])
            found.extend([False] * len(leaves))
            return [watched(i, x) for i, x in enumerate(leaves) if _is_inexact(x)]

        jax.eval_shape(lambda rest: jax.vjp(run, rest)[0], rest)
        return found


class _Weights:
    """The layers' parameters, stacked."""

    def __init__(self, layers: Any):
        self.stacks, self.structure = jax.tree.flatten(layers)
        self.length = length_of(layers)

    @property
    def ahead(self) -> bool:
        """Whether weights are fetched while the layer before is computed."""
        return FETCHES_AHEAD and self.length > 1 and any(map(on_host, self.stacks))

    def fetched(self, stacks: list[Any], i: Any) -> list[Any]:
        """What is fetched ahead of layer i's turn; None for what need not be."""
        if i is None or not self.ahead:
            return [None] * len(stacks)
        return [slab(x, i) if on_host(x) else None for x in stacks]

    def slabs(
        self, stacks: list[Any], i: Any, ahead: list[Any] | None = None
    ) -> list[Any]:
        """Layer i, of which `ahead` has been fetched; None: nothing has."""
        return [
            slab(x, i) if here is None else here
            for x, here in zip(stacks, ahead or [None] * len(stacks), strict=True)
        ]

    def of(self, slabs: list[Any]) -> Any:
        """One layer's parameters, as the model sees them."""
        return jax.tree.unflatten(self.structure, [x[0] for x in slabs])


@dataclasses.dataclass(frozen=True)
class _Run:
    """One step, being traced."""

    model: _Model
    parts: Parts
    applied: Applied
    norms: _Norms
    accumulate: bool

    def __call__(
        self, workspace: GradientWorkspace, batch: Any
    ) -> tuple[Any, Any, GradientWorkspace, LayerwiseOutput]:
        parts = self.parts
        weights = _Weights(parts.layers)
        # Rows of matrices that live on the host are no whole tiles on a TPU.
        home = [on_host(x) and not goes_in_slabs(x) for x in weights.stacks]
        weights.stacks = [
            jax.device_put(x, DEVICE) if moves else x
            for x, moves in zip(weights.stacks, home, strict=True)
        ]
        sweep = self._from_host if workspace.host is not None else self._at_once
        stacks, slabs, small, drest, workspace, output = sweep(
            weights, parts.rest, workspace, batch
        )
        stacks, others, state = self.applied.rest(
            stacks, slabs, small, parts.others(parts.rest), parts.others(drest)
        )
        stacks = [
            jax.device_put(x, HOST) if moves else x
            for x, moves in zip(stacks, home, strict=True)
        ]
        params = jax.tree.unflatten(parts.structure, parts.joined(stacks, others))
        return params, state, workspace, output

    def _at_once(
        self, weights: _Weights, rest: Any, workspace: GradientWorkspace, batch: Any
    ) -> tuple[Any, ...]:
        """Each layer's update follows its gradients."""
        one = self._bundle(weights, rest, batch, workspace, self.accumulate)
        norm = drest = None
        if self.norms.needed_first:
            add = lambda square, i, slabs, gradients: (
                square + self.norms.square(gradients),
                slabs,
            )
            square, stacks, back = one.backward(add, self.norms.zero)
            drest = one.rest_gradients(back)
            norm = jnp.sqrt(square + self.norms.square(drest))
            # The second pass is not to be taken for a part of the first.
            norm, stacks, drest, one.inputs = lax.optimization_barrier(
                (norm, stacks, drest, one.inputs)
            )
            one.stacks = stacks

        def visit(carry: Any, i: Any, slabs: list[Any], gradients: Any) -> Any:
            square, slots, workspace, small = carry
            own = self.norms.square(gradients)
            found = jnp.sqrt(own) if norm is None else norm
            workspace = workspace.zero_accumulators().write(
                self.norms.scaled(gradients, found)
            )
            gradients = [x[None] for x in jax.tree.leaves(workspace.gradients)]
            small = self.applied.collect(small, gradients, i)
            slots, new = self.applied.layer(slots, slabs, gradients, i)
            return (square + own, slots, workspace, small), new

        start = (
            self.norms.zero,
            self.applied.slots,
            workspace,
            self.applied.collector(workspace.gradients, weights.length),
        )
        (square, slots, workspace, small), stacks, back = one.backward(visit, start)
        if norm is None:
            drest = one.rest_gradients(back)
            own = self.norms.square(drest)
            norm = jnp.sqrt(square + own)
            drest = self.norms.scaled(drest, jnp.sqrt(own))
        else:
            drest = self.norms.scaled(drest, norm)
        output = LayerwiseOutput(one.loss, one.metrics, norm)
        return stacks, slots, small, drest, workspace, output

    def _from_host(
        self, weights: _Weights, rest: Any, workspace: GradientWorkspace, batch: Any
    ) -> tuple[Any, ...]:
        """Gradients leave for the host; updates follow when all are there."""
        host, structure = jax.tree.flatten(workspace.host)
        count = len(jax.tree.leaves(batch)[0]) if self.accumulate else 1

        def one_batch(carry: Any, given: Any) -> Any:
            stacks, host, workspace, drest = carry
            number, batch = given
            weights_now = _Weights(jax.tree.unflatten(weights.structure, stacks))
            one = self._bundle(weights_now, rest, batch, workspace, False)

            def visit(carry: Any, i: Any, slabs: list[Any], gradients: Any) -> Any:
                square, host, workspace = carry
                workspace = workspace.zero_accumulators().write(gradients)
                new = []
                for old, g in zip(
                    host, jax.tree.leaves(workspace.gradients), strict=True
                ):
                    g = g[None] / count
                    if count > 1:
                        before = slab(old, i).astype(g.dtype)
                        g = g + jnp.where(number == 0, jnp.zeros_like(g), before)
                    new.append(g.astype(old.dtype))
                host = [put(old, g, i) for old, g in zip(host, new, strict=True)]
                return (square + self.norms.square(new), host, workspace), slabs

            start = (self.norms.zero, host, workspace)
            (square, host, workspace), stacks, back = one.backward(visit, start)
            made = jax.tree.map(lambda x: x / count, one.rest_gradients(back))
            if drest is not None:
                made = jax.tree.map(jnp.add, drest, made)
            return (stacks, host, workspace, made), (one.loss, one.metrics, square)

        if self.accumulate:
            zeros = jax.tree.map(jnp.zeros_like, rest)
            (stacks, host, workspace, drest), (losses, metrics, squares) = lax.scan(
                one_batch,
                (weights.stacks, host, workspace, zeros),
                (jnp.arange(count), batch),
            )
            loss, square = jnp.mean(losses), squares[-1]
        else:
            (stacks, host, workspace, drest), (loss, metrics, square) = one_batch(
                (weights.stacks, host, workspace, None), (jnp.int32(0), batch)
            )
        own = self.norms.square(drest)
        norm = jnp.sqrt(square + own)
        norm, stacks, host = lax.optimization_barrier((norm, stacks, host))

        def body(i: Any, following: Any, carry: Any) -> Any:
            del following  # the moments take longer than the weights, and come alone
            stacks, slots, small = carry
            slabs = weights.slabs(stacks, i)
            gradients = [
                slab(g, i).astype(x.dtype)
                for g, x in zip(host, jax.tree.leaves(workspace.gradients), strict=True)
            ]
            here = (
                norm
                if self.norms.clip == "global"
                else jnp.sqrt(self.norms.square(gradients))
            )
            gradients = self.norms.scaled(gradients, here)
            small = self.applied.collect(small, gradients, i)
            slots, new = self.applied.layer(slots, slabs, gradients, i)
            stacks = self._written(stacks, slabs, new, i)
            return stacks, slots, small

        small = self.applied.collector(workspace.gradients, weights.length)
        stacks, slots, small = upwards(
            weights.length, body, (stacks, self.applied.slots, small)
        )
        drest = self.norms.scaled(
            drest, norm if self.norms.clip == "global" else jnp.sqrt(own)
        )
        workspace = dataclasses.replace(
            workspace, host=jax.tree.unflatten(structure, host)
        )
        output = LayerwiseOutput(loss, metrics, norm)
        return stacks, slots, small, drest, workspace, output

    @staticmethod
    def _written(stacks: list[Any], slabs: list[Any], new: list[Any], i: Any) -> Any:
        return [
            x if made is old else put(x, made, i)
            for x, old, made in zip(stacks, slabs, new, strict=True)
        ]

    def _bundle(
        self,
        weights: _Weights,
        rest: Any,
        batch: Any,
        workspace: GradientWorkspace,
        several: bool,
    ) -> "_Bundle":
        return _Bundle(self.model, weights, rest, batch, workspace, several)


def _each_with(gradients: Any, ahead: list[Any]) -> tuple[Any, list[Any]]:
    """Has each matrix of the following layer there when its gradient is made.

    So it travels while the gradients are computed, and is read from the stack before
    this layer's is written to it; otherwise XLA would copy the stack.
    """
    flat, structure = jax.tree.flatten(gradients)
    pairs = [
        (g, a) if a is None else lax.optimization_barrier((g, a))
        for g, a in zip(flat, ahead, strict=True)
    ]
    return jax.tree.unflatten(structure, [g for g, _ in pairs]), [a for _, a in pairs]


class _Bundle:
    """The micro-batches that go through the layers together: all of them, or one."""

    def __init__(
        self,
        model: _Model,
        weights: _Weights,
        rest: Any,
        batch: Any,
        workspace: GradientWorkspace,
        several: bool,
    ):
        self.model, self.weights, self.rest, self.batch = model, weights, rest, batch
        self.several = several
        self.dtypes = [x.dtype for x in jax.tree.leaves(workspace.gradients)]
        x, self.inputs, keep, self.context, self.stacks = model.forward(
            weights, rest, batch, self._each
        )
        one = jax.tree.map(lambda x: x[0], batch) if several else batch
        self.learned = model.learned(rest, one)
        if not several:
            self.loss, self.metrics, self.drest, self.dx, self.dkept = model.head(
                rest, x, keep, batch
            )
            return
        count = len(jax.tree.leaves(batch)[0])

        def head(drest: Any, given: Any) -> Any:
            loss, metrics, dr, dx, dkept = model.head(rest, *given)
            mean = lambda tree: jax.tree.map(lambda g: g / count, tree)
            drest = jax.tree.map(lambda s, g: s + g.astype(s.dtype) / count, drest, dr)
            return drest, (loss, metrics, mean(dx), mean(dkept))

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), rest)
        keep = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), keep)
        self.drest, (losses, self.metrics, self.dx, dkept) = lax.scan(
            head, zeros, (x, keep, batch)
        )
        self.dkept = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), dkept)
        self.loss = jnp.mean(losses)

    def _each(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function for each micro-batch, one after the other."""
        if not self.several:
            return function(*arguments)
        return lax.map(lambda xs: function(*xs), arguments)

    def backward(self, visit: Callable[..., Any], start: Any) -> tuple[Any, ...]:
        """Runs `visit(carry, i, slabs, gradients)` for each layer, the last first.

        Returns:
          The last carry, the stacks with what `visit` returned in place of the slabs,
          and the gradients by what the prologue made: the first layer's input, and the
          learned context.
        """
        weights = self.weights

        def body(i: Any, following: Any, carry: Any) -> Any:
            carry, back, stacks, ahead = carry
            fetched = weights.slabs(stacks, i, ahead)
            ahead = weights.fetched(stacks, following)
            x = jax.tree.map(lambda to: slab(to, i)[0], self.inputs)
            dkept = jax.tree.map(lambda to: slab(to, i)[0], self.dkept)
            gradients, back = self._pull(fetched, x, i, back, dkept)
            # Or XLA:CPU fuses the products into the update, and copies the stacks.
            gradients, fetched, back = lax.platform_dependent(
                (gradients, fetched, back),
                cpu=lax.optimization_barrier,
                default=lambda values: values,
            )
            gradients, ahead = _each_with(gradients, ahead)
            carry, new = visit(carry, i, fetched, gradients)
            if all(a is b for a, b in zip(new, fetched, strict=True)):
                stacks, _ = kept(stacks, fetched, i)
            else:
                stacks = _Run._written(stacks, fetched, new, i)
            if weights.ahead:
                # Of two layers a trip, the second's moments wait for the first's.
                carry, back = lax.optimization_barrier((carry, back))
            return carry, back, stacks, ahead

        ahead = weights.fetched(self.stacks, weights.length - 1)
        dcontext = jax.tree.map(jnp.zeros_like, _parted(self.context, self.learned)[0])
        carry, back, stacks, _ = downwards(
            weights.length,
            body,
            (start, (self.dx, dcontext), self.stacks, ahead),
            ahead=weights.ahead,
        )
        return carry, stacks, back

    def _pull(
        self, slabs: list[Any], x: Any, i: Any, back: Any, dkept: Any
    ) -> tuple[Any, Any]:
        """One layer's gradients; and those by its input, and so far by the context."""
        weights = self.weights.of(slabs)
        dx, dcontext = back
        pull = lambda x, context, dx, dkept: self.model.pull(
            weights, x, context, self.learned, i, dx, dkept
        )
        more = lambda made: jax.tree.map(jnp.add, dcontext, made)
        narrow = lambda g: jax.tree.unflatten(
            self.weights.structure,
            [
                x.astype(dtype)
                for x, dtype in zip(jax.tree.leaves(g), self.dtypes, strict=True)
            ],
        )
        if not self.several:
            gradients, dx, made = pull(x, self.context, dx, dkept)
            return narrow(gradients), (dx, more(made))

        def one(total: Any, given: Any) -> Any:
            gradients, *back = pull(*given)
            return jax.tree.map(jnp.add, total, narrow(gradients)), back

        zeros = jax.tree.map(jnp.zeros_like, narrow(weights))
        gradients, (dx, made) = lax.scan(one, zeros, (x, self.context, dx, dkept))
        return gradients, (dx, more(made))

    def rest_gradients(self, back: Any) -> Any:
        """The gradients by all parameters but the layers': the prologue's added."""
        first = lambda batch, back: self.model.first(
            self.rest, batch, self.learned, back
        )
        if not self.several:
            return jax.tree.map(jnp.add, self.drest, first(self.batch, back))

        def one(total: Any, given: Any) -> Any:
            made = first(*given)
            return jax.tree.map(lambda s, g: s + g.astype(s.dtype), total, made), None

        return lax.scan(one, self.drest, (self.batch, back))[0]


def _wide(dtype: Any) -> np.dtype:
    """The dtype that micro-batches are added up in."""
    return np.promote_types(dtype, np.float32)


def _widest(*trees: Any) -> np.dtype:
    """The widest real dtype of any leaf: float32, or float64."""
    dtypes = [x.dtype for x in jax.tree.leaves(trees)]
    return jnp.finfo(functools.reduce(np.promote_types, dtypes, np.float32)).dtype


def _is_inexact(x: Any) -> bool:
    """Whether a leaf is an array that can have a gradient."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _inexact(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """What is differentiable of a tree, and what puts it back."""
    return _parted(tree, [_is_inexact(x) for x in jax.tree.leaves(tree)])


def _parted(
    tree: Any, chosen: Sequence[bool]
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The chosen leaves of a tree, and what puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)

    def merge(values: list[Any]) -> Any:
        given = iter(values)
        return jax.tree.unflatten(
            structure,
            [next(given) if yes else x for x, yes in zip(leaves, chosen, strict=True)],
        )

    return [x for x, yes in zip(leaves, chosen, strict=True) if yes], merge


def _refuse_integers(params: Any) -> None:
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {jax.typeof(x)} and has no"
                " gradient: leave it out of params. Tables and keys go to the model"
                " with the batch, and to its layers as the prologue's context."
            )


def _refuse_other_counts(batch: Any) -> None:
    """Refuses what is not the same number of micro-batches, stacked."""
    flat = jax.tree_util.tree_flatten_with_path(batch)[0]
    counts = {jnp.shape(x)[:1] for _, x in flat}
    if len(counts) != 1 or counts & {(), (0,)}:
        shapes = [
            f"batch{jax.tree_util.keystr(path)} of shape {jnp.shape(x)}"
            for path, x in flat
        ]
        raise ValueError(
            f"accumulate=True with {', '.join(shapes) or 'no arrays in the batch'}:"
            " stack each leaf of the micro-batches on a leading axis, of one length for"
            " all; repeat what they share, as in jnp.full(count, value)."
        )


def _refuse_other_input(x: Any, made: Any) -> None:
    describe = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    if describe(x) != describe(made):
        raise ValueError(
            f"layer turns {describe(x)} into {describe(made)}: a layer's output is the"
            " next one's input, so that both must be alike; cast in the layer, or in"
            " the prologue."
        )
