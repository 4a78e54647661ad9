"""A training step with the gradients of one layer at a time."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import optax
from jax import lax
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import warn_of_options
from paged_optax.backend.validation import check_rate, check_transformation
from paged_optax.layerwise.clipping import Clipping
from paged_optax.layerwise.dependencies import chunked_leaves
from paged_optax.layerwise.forward import on_automatic_axes, on_explicit_axes
from paged_optax.layerwise.host_updates import (
    finish_update,
    update_after_norm,
    update_next_step,
)
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.layerwise_model import LayerwiseModel
from paged_optax.layerwise.loss import LayerwiseOutput
from paged_optax.layerwise.overlap import can_overlap
from paged_optax.layerwise.parameters import Partition, from_numpy, widest
from paged_optax.layerwise.step_arguments import (
    PagedInside,
    check_inexact,
    check_same_counts,
    check_state,
    compare_processes,
    find_paged,
    known_shards,
    warn_of_divided_layers,
    warn_of_moved,
)
from paged_optax.layerwise.tree_update import TreeUpdate
from paged_optax.layerwise.updates import Guard, TracedStep, update_during_backward
from paged_optax.layerwise.workspace import GradientWorkspace
from paged_optax.step_skipping import wrapper_of

# XLA:TPU copies whole host stacks that are updated during other layers' gradients
# (libtpu 0.0.52: 1.5 GB for 36 layers of float32). A CPU has no link.
_OVERLAPPED = ("cuda", "rocm")


def layerwise_step(
    model: LayerwiseModel,
    tx: optax.GradientTransformation,
    *,
    max_norm: float | int | None = None,
    clip: Literal["global", "layer"] = "global",
    accumulate: bool = False,
    activations_on_host: bool = False,
    recompute: bool = True,
    layers: str = "layers",
) -> "LayerwiseStep":
    r"""Returns a training step that holds the gradients of one layer at a time.

    The forward pass saves each layer's input. From the last layer to the first, the
    step then computes the layer's VJP into the workspace and updates the layer:

    .. math::
        g_i, \bar x_{i} = \mathrm{vjp}_i(\bar x_{i+1}), \qquad
        \theta_i, s_i \leftarrow \mathrm{tx}(g_i, s_i, \theta_i),
        \qquad i = L-1, \ldots, 0.

    Vectors such as norms and biases, and the parameters outside the layers, are updated
    after the last of these, all at once.

    On GPUs, from jax 0.11.2 on, a layer is updated while the gradients of the layer
    before it are computed: moments travel in both directions during the products, and
    the device holds the gradients of two layers. On other devices, and if the gradients
    of all layers are known first (for the global norm, or in the workspace), moments
    are written back after the layer's gradients are computed.
    The numbers are those of an ordinary step, up to the rounding of sums in another
    order.

    The parameters are a mapping. Its key `layers` has the layers' parameters, stacked
    on the leading axis of each leaf. Prologue and epilogue both receive the other
    entries, which allows tied embeddings. Stacks in host memory stay there: each
    layer's weights are fetched for its forward and its backward pass. Other parameters
    may be in host memory too: they are fetched for the prologue, the epilogue and their
    update.

    `tx` updates the parameters of a `split_layers` model as it updates the loss's own
    tree. It may be any transformation that combines no parameters. If the stacks are
    the model's own parameters, each layer is updated in stacks of one layer, and the
    update must be element by element: `paged_adamw` and similar optimizers, chained,
    masked, scheduled. Clip with `max_norm`, not in `tx`.

    `paged_optax.apply_if_finite` may wrap the whole of `tx` if all gradients exist
    before the first update: with a workspace on the host, deferred or not, or with
    `max_norm` and two passes. A step with a gradient that is not finite then changes no
    parameter and no moment, and the counts are Optax's. A finite value counts as finite
    even if the square of the norm overflows.

    Clipping by the global norm takes a second backward pass, 1.5 times the step; or,
    with a workspace that has `host_dtype`, the gradients' way to the host and back, 1.1
    times (on a CPU: jax 0.10.2, 8 layers of 1024; on a GPU, not measured).

    With a workspace that is allocated with `rest`, a step leaves its gradients to the
    next step, which applies them first: on GPUs, from jax 0.11.2 on, each layer's
    during the forward pass of the layer before it. `finish` applies the last gradients.
    A state that changes between two steps, for example by an injected learning rate,
    changes the update by the previous step's gradients. A schedule has the rates of an
    ordinary step. Save after `finish`, or save the workspace too.

    Args:
      model: The model: the result of `split_layers` for an ordinary loss, or
        `LayerwiseModel(prologue, layer, epilogue)`.
      tx: The transformation of the whole tree of parameters, with `paged(...)` inside
        or without. Moments or a workspace that left the host raise an error if `tx` was
        built with `on_moved="raise"`, and a warning if not.
      max_norm: The largest norm of the gradients; None disables clipping.
      clip: `"global"` clips like `optax.clip_by_global_norm`, exactly. `"layer"` clips
        each layer, and the rest, by its own norm, at no cost.
      accumulate: If true, `batch` has several micro-batches, stacked on the leading
        axis of its leaves. The step uses the mean of their losses, or with a
        `WeightedLoss` their totals divided by their weights. The inputs of all
        micro-batches are kept, and each layer's gradients are their sum. With a
        workspace's `host_dtype` or `device_dtype` the gradients of all layers add up,
        one micro-batch at a time.
      activations_on_host: If true, the layers' inputs are in host memory.
      recompute: If false, the forward pass saves a layer's residuals beside its input,
        and the backward pass does not compute the layer again. They are all
        intermediate values, or those that a `jax.checkpoint` of the layer saves.
      layers: The key of the layers' parameters, as in `what_fits`.

    Returns:
      `step(params, state, workspace, batch, frozen=None)`. It returns the new
      parameters, state and workspace, and a `LayerwiseOutput`. Compile it with
      `jit_step` or `jax.jit`, and donate the first three arguments.

    Raises:
      ValueError: When traced, if `tx` needs all gradients first, or several elements of
        a stack that is the model's own; if the state is another transformation's; if
        the workspace is of another model; or if the layers' stacks differ in length.

    Example:
      >>> import jax.numpy as jnp, paged_optax as po
      >>> params = {"layers": {"kernel": jnp.full((3, 64, 64), 0.01)}}
      >>> step = po.layerwise_step(
      ...     po.LayerwiseModel(lambda rest, batch: (batch, None),
      ...     lambda weights, x, context, i: (x + x @ weights["kernel"], None),
      ...     lambda rest, x, kept, batch: jnp.mean((x - 1.0) ** 2)),
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
    check_transformation("tx", tx)
    if max_norm is not None:
        check_rate("max_norm", max_norm)
    tree, saves = model.layer_tree, not recompute
    return LayerwiseStep(
        model, tx, max_norm, clip, accumulate, activations_on_host, saves, layers, tree
    )


@dataclasses.dataclass(eq=False)
class LayerwiseStep:
    """The step that `layerwise_step` returns; `finish` applies deferred gradients."""

    _model: LayerwiseModel
    _tx: optax.GradientTransformation
    _max_norm: float | int | None
    _clip: str
    _accumulate: bool
    _activations_on_host: bool
    _saves: bool
    _layers: str
    _layer_tree: LayerTree | None
    # True after the warning about divided layers. No program depends on it.
    _warned: bool = False

    # The name of the compiled function.
    __name__ = "layerwise_step"

    def __call__(
        self,
        params: PyTree,
        state: PyTree,
        workspace: GradientWorkspace,
        batch: PyTree,
        frozen: PyTree = None,
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        """Trains one step.

        Args:
          params: All parameters.
          state: The state that `model.init(tx, params)` makes.
          workspace: The workspace.
          batch: The batch for prologue and epilogue.
          frozen: Parameters that are not trained, a mapping like `params`; see
            `LayerwiseModel`.

        Returns:
          The new parameters, state and workspace, and a `LayerwiseOutput`. Deferred
          updates of this step are not in the parameters and the state.
        """
        params, frozen = from_numpy((params, frozen))
        warn_of_options((params, state, workspace, frozen))
        paged = find_paged(self._tx, params, state, self._layer_tree)
        # Explicit types still have shardings.
        if not self._warned:
            self._warned = warn_of_divided_layers(paged, params, frozen, self._layers)
        names = "max_norm", "clip", "accumulate"
        settings = {name: getattr(self, f"_{name}") for name in names}
        compare_processes(paged, params, state, workspace, settings)
        args = params, state, workspace, batch, frozen
        run = functools.partial(self._run, paged)
        return on_automatic_axes(run, args, (params, state, workspace, None))

    def finish(
        self, params: PyTree, state: PyTree, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        """Applies the update that the last step deferred, if there is one.

        Call it before parameters or state are used for anything except the next step,
        for example before an evaluation or a checkpoint. Training continues with its
        results. Compile it with `jit_step` or `jax.jit`, and donate all arguments.

        Args:
          params: The parameters of the last step.
          state: The state of the last step.
          workspace: The workspace of the last step, which was allocated with `rest`.

        Returns:
          The new parameters, state and workspace.

        Raises:
          ValueError: When traced, if the workspace was allocated without `rest`, or for
            another model; if the state is another transformation's.

        Example:
          >>> import jax.numpy as jnp, paged_optax as po
          >>> params = {"layers": {"kernel": jnp.full((3, 64, 64), 0.01)}}
          >>> step = po.layerwise_step(
          ...     po.LayerwiseModel(lambda rest, batch: (batch, None),
          ...     lambda weights, x, context, i: (x + x @ weights["kernel"], None),
          ...     lambda rest, x, kept, batch: jnp.mean((x - 1.0) ** 2)),
          ...     tx := po.paged_adamw(1e-2),
          ...     max_norm=1.0,
          ... )
          >>> workspace = po.GradientWorkspace.allocate(
          ...     params["layers"], host_dtype="float32", rest={}
          ... )
          >>> args = params, tx.init(params), workspace, jnp.ones((8, 64))
          >>> compiled = po.jit_step(step, *args, donate_argnums=(0, 1, 2))
          >>> *args, output = compiled(*args)
          >>> bool((args[0]["layers"]["kernel"] == 0.01).all())
          True
          >>> finish = po.jit_step(step.finish, *args, donate_argnums=(0, 1, 2))
          >>> params, state, workspace = finish(*args)
          >>> bool((params["layers"]["kernel"] == 0.01).any())
          False
        """
        args = from_numpy(params), state, workspace
        warn_of_options(args)
        return on_automatic_axes(self._finish, args, args)

    def _run(
        self,
        paged: Sequence[PagedInside],
        params: PyTree,
        state: PyTree,
        workspace: GradientWorkspace,
        batch: PyTree,
        frozen: PyTree,
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        if self._accumulate:
            check_same_counts(batch)
        step = self._prepare(paged, params, state, workspace, frozen)
        optimizer, clipping = step.optimizer, step.clipping
        model = on_explicit_axes(step.model, step.partition, batch, self._accumulate)
        model = dataclasses.replace(model, saves=self._saves)
        deferred, update = workspace.pending is not None, update_during_backward
        if workspace.host is not None:
            update = update_next_step if deferred else update_after_norm

        def run(
            optimizer: LayerOptimizer, overlaps: bool
        ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
            new = {"model": model, "optimizer": optimizer, "overlaps": overlaps}
            return update(dataclasses.replace(step, **new), workspace, batch)

        warn_of_moved(paged, workspace)
        known_first = workspace.host is not None or clipping.needed_first
        if step.guard.wrapper is not None and not known_first:
            raise ValueError(
                "tx is an apply_if_finite, whose `reduce_and` combines all gradients,"
                " and here each layer is updated before the next one's are there. They"
                " are all known first with a workspace of"
                " GradientWorkspace.allocate(..., host_dtype='float32');"
                " or with max_norm= (and clip='global'), at the price of a second"
                " backward pass."
            )
        # Nothing overlaps if a separate backward pass computes the norm. The gradients
        # of two layers would take more memory than that first pass.
        apart = self._accumulate if deferred else known_first
        if apart or not can_overlap(optimizer):
            return run(optimizer, False)
        if not self._accumulate and not clipping.by_layer:
            chunked = chunked_leaves(model.run_prologue, optimizer.layered, batch)
            with contextlib.suppress(ValueError):  # a choice by shape, for one of them
                optimizer = optimizer.in_chunks(chunked)
        # Traced once for both names of a GPU.
        on_gpu = jax.jit(functools.partial(run, optimizer, True), inline=True)
        return lax.platform_dependent(
            default=functools.partial(run, step.optimizer, False),
            **dict.fromkeys(_OVERLAPPED, on_gpu),
        )

    def _finish(
        self, params: PyTree, state: PyTree, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        paged = find_paged(self._tx, params, state, self._layer_tree)
        step = self._prepare(paged, params, state, workspace)
        if workspace.pending is None:
            raise ValueError(
                "workspace has nothing to finish: only updates by a workspace that is"
                " allocated with rest= and host_dtype= are deferred."
            )
        warn_of_moved(paged, workspace)
        return finish_update(step, workspace)

    def _prepare(
        self,
        paged: Sequence[PagedInside],
        params: PyTree,
        state: PyTree,
        workspace: GradientWorkspace,
        frozen: PyTree = None,
    ) -> TracedStep:
        """Checks the arguments, and traces the update."""
        tree = self._layer_tree
        if tree is not None and tree.length:
            tree.stacked_leaves(params)
        partition = Partition.create(params, self._layers)
        check_inexact(params)
        workspace.check(partition.layers, partition.rest)
        fresh = check_state(self._tx, params, state, tree)
        wrapper = wrapper_of(self._tx)
        tx, inside = self._tx, lambda state: state
        if wrapper is not None:
            tx, inside = wrapper.inner, wrapper.inside
        dtype = widest(partition.rest, workspace.gradients)
        clipping = Clipping(self._max_norm, self._clip, dtype, wrapper is not None)
        if workspace.pending is not None and clipping.by_layer:
            raise ValueError(
                "clip='layer' with a workspace of deferred updates: a layer's own norm"
                " is known with the layer's gradients, and nothing need be deferred."
                " Allocate the workspace without rest=."
            )
        shards, moments = (
            known_shards(paged, params, moments=x) for x in (False, True)
        )
        gradients = workspace.gradients
        layered = LayeredState(
            params, partition, inside(state), gradients, (shards, moments)
        )
        tree_state = None if fresh is None else inside(fresh)
        update = TreeUpdate.create(tx, tree, layered, tree_state)
        enabled = True if workspace.pending is None else workspace.pending.waits
        optimizer = LayerOptimizer(update, enabled)
        if frozen is not None:
            frozen = Partition.of_frozen(frozen, self._layers, layered.length)
        model = self._model.functions(partition, frozen, self._activations_on_host)
        guard = Guard(wrapper, state)
        return TracedStep(model, optimizer, clipping, guard, self._accumulate)
