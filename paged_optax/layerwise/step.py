"""A training step whose backward pass handles one layer at a time."""

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
from paged_optax.backend.validation import brief, check_rate, check_transformation
from paged_optax.layerwise.backward_update import BackwardUpdate
from paged_optax.layerwise.clipping import Clipping, Guard, widest
from paged_optax.layerwise.deferred_update import DeferredUpdate
from paged_optax.layerwise.dependencies import chunked_leaves
from paged_optax.layerwise.host_gradients import HostGradients
from paged_optax.layerwise.layer_optimizer import LayerOptimizer
from paged_optax.layerwise.layer_tree import LayerTree
from paged_optax.layerwise.layered_state import LayeredState
from paged_optax.layerwise.layerwise_model import (
    LayerwiseModel,
    on_automatic_axes,
    on_explicit_axes,
)
from paged_optax.layerwise.loss import LayerwiseOutput
from paged_optax.layerwise.parameters import (
    Partition,
    from_numpy,
    length_of,
    refuse_one_by_one,
)
from paged_optax.layerwise.step_arguments import (
    Answer,
    ask,
    compare_processes,
    refuse_integers,
    refuse_other_counts,
    refuse_other_state,
    warn_of_divided_layers,
    warn_of_moved,
)
from paged_optax.layerwise.weights import Frozen
from paged_optax.layerwise.workspace import GradientWorkspace

# XLA:TPU copies stacks in host memory whole that are updated beside other layers'
# gradients (libtpu 0.0.52: of 36 layers of float32, 1.5 GB). A CPU has no link.
_OVERLAPPED = ("cuda", "rocm")


def layerwise_step(
    model: LayerwiseModel,
    tx: optax.GradientTransformation,
    *,
    max_norm: float | int | None = None,
    clip: Literal["global", "layer"] = "global",
    accumulate: bool = False,
    activations_on_host: bool = False,
    layers: str = "layers",
) -> "LayerwiseStep":
    r"""A training step with the gradients of one layer alive, instead of all.

    Forward over the layers, which saves each one's input; then, from the last layer to
    the first, the layer's VJP into the workspace and its update:

    .. math::
        g_i, \bar x_{i} = \mathrm{vjp}_i(\bar x_{i+1}), \qquad
        \theta_i, s_i \leftarrow \mathrm{tx}(g_i, s_i, \theta_i),
        \qquad i = L-1, \ldots, 0.

    On one GPU, from jax 0.11.2 on, a layer is updated while the gradients of the one
    before it are made: its moments travel both ways beside the products. The device
    then holds the gradients of two layers, and half of a layer's moments. Elsewhere,
    and if the global norm is clipped, moments come while the layer's gradients are
    made, and leave after. Parameters and state are those of an ordinary step; so are
    the numbers, to the rounding of sums in another order.

    The parameters are a mapping with the key `layers`, the layers' parameters stacked
    on the leading axis of each leaf (as `nnx.vmap`, `nnx.scan`, Linen's `nn.scan` and
    `jax.vmap` of an initialiser give them), and whatever else the model has. What else
    there is goes to prologue and epilogue alike, so that embeddings may be tied.
    Stacks in host memory stay there. Each layer's weights are fetched for its forward
    pass, and again for its backward pass. They travel while the layer before computes.
    Before jax 0.11.2 they travel while other parts of the same layer compute. Other
    parameters may be in host memory too: they are fetched for the prologue, the
    epilogue and their update, and their gradients wait on the host in between.

    A model of `split_layers` is updated as `tx` updates the loss's own tree, by any
    transformation that combines no parameters. Of stacks that are the model's own, what
    one layer needs of `tx` must be element by element: `paged_adamw` and its like,
    chained, masked, scheduled. Clip by `max_norm` here, not in `tx`.

    `paged_optax.apply_if_finite` may be around the whole of `tx`, where all gradients
    are known before the first update: with a workspace on the host, deferred or not, or
    with `max_norm` and two passes. A step of which a gradient is not finite then
    changes no parameter and no moment, and the counts are Optax's. A finite value
    counts as finite though the square of the norm may overflow. If updates are
    deferred, a step counts its own gradients, and leaves nothing if they are rejected.

    | clipping by the global norm | device bytes | over the link | passes | time |
    | --- | --- | --- | --- | --- |
    | workspace with `host_dtype` | one layer's gradients | gradients, twice | 1 | 1.1 |
    | the same with `rest` | and the rest's | gradients, twice | 1 | 1.1 |
    | workspace without | one layer's gradients | nothing more | 2 | 1.5 |

    Passes are backward passes. Times are to an ordinary step that clips, on a CPU:
    jax 0.10.2, 8 layers of 1024 (`tests/benchmarks/run.py`, section "layerwise"); on a
    GPU, not measured.

    With a workspace that is allocated with `rest` a step leaves its gradients to the
    next step, which applies them before anything else: each layer's, on one GPU from
    jax 0.11.2 on, while the layer before computes its forward pass. So moments and
    gradients travel beside products although the norm is known last. `finish` applies
    the last ones. A state that changes between two steps, by an injected learning rate
    for example, changes the update by the gradients of the step before; a schedule has
    the rates of an ordinary step. Save after `finish`, or the workspace too:

    ```python
    rest = {name: x for name, x in params.items() if name != "layers"}
    workspace = po.GradientWorkspace.allocate(
        params["layers"], host_dtype="bfloat16", rest=rest
    )
    for batch in batches:
        params, state, workspace, output = compiled(params, state, workspace, batch)
    params, state, workspace = finish(params, state, workspace)
    ```

    Args:
      model: The model: what `split_layers` makes of an ordinary loss, or
        `LayerwiseModel(prologue, layer, epilogue)` by hand.
      tx: The transformation of the whole tree of parameters, with `paged(...)` inside
        or without. If it was built with `on_moved="raise"`, moments or a workspace that
        have left the host are an error; otherwise a warning.
      max_norm: The norm that gradients are scaled down to; None: no clipping.
      clip: The norm of what: `"global"` is `optax.clip_by_global_norm`, exactly;
        `"layer"` clips each layer, and the rest, by its own norm, which costs nothing.
      accumulate: Whether `batch` is several micro-batches, stacked on the leading axis
        of its leaves; the step is that of the mean of their losses, or with a
        `WeightedLoss` that of their totals by their weights. Layer by layer, all
        micro-batches' inputs are kept and each layer's gradients add up in the
        workspace; with a workspace's `host_dtype` they add up on the host, one
        micro-batch after the other.
      activations_on_host: Whether the layers' inputs wait in host memory.
      layers: The key of the layers' parameters, as in `what_fits`.

    Returns:
      `step(params, state, workspace, batch)`, which returns the new parameters, state
      and workspace, and a `LayerwiseOutput`. Compile it with `jit_step`, or `jax.jit`,
      and donate the first three.

    Raises:
      ValueError: When traced, if `tx` needs all gradients first, or several elements of
        a stack that is the model's own, if the state is another transformation's, if
        the workspace is of another model, or if the layers are not stacked alike.

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
    if not isinstance(model, LayerwiseModel):
        raise TypeError(
            f"model={brief(model)} is no LayerwiseModel: pass split_layers(loss,"
            " params, batch), or LayerwiseModel(prologue, layer, epilogue)."
        )
    check_transformation("tx", tx)
    if max_norm is not None:
        check_rate("max_norm", max_norm)
    tree = model.layer_tree
    return LayerwiseStep(
        model, tx, max_norm, clip, accumulate, activations_on_host, layers, tree
    )


@dataclasses.dataclass(eq=False)
class LayerwiseStep:
    """What `layerwise_step` returns: call it, or `finish` what it leaves."""

    _model: LayerwiseModel
    _tx: optax.GradientTransformation
    _max_norm: float | int | None
    _clip: str
    _accumulate: bool
    _activations_on_host: bool
    _layers: str
    _layer_tree: LayerTree | None
    # Whether it has warned of divided layers. No program depends on it.
    _warned: bool = False

    # By this name JAX calls what it compiles.
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
          batch: What prologue and epilogue get.
          frozen: Parameters that are used and not trained, a mapping like `params`; see
            `layerwise_step`.

        Returns:
          The new parameters, state and workspace, and a `LayerwiseOutput`. If updates
          are deferred, parameters and state are those before this step's own update.
        """
        params, frozen = from_numpy((params, frozen))
        warn_of_options((params, state, workspace, frozen))
        answers = ask(self._tx, params, state, self._layer_tree)
        # While types still say how arrays are divided.
        if not self._warned:
            self._warned = warn_of_divided_layers(answers, params, frozen, self._layers)
        names = "max_norm", "clip", "accumulate"
        settings = {name: getattr(self, f"_{name}") for name in names}
        compare_processes(answers, params, state, workspace, settings)
        arguments = params, state, workspace, batch, frozen
        run = functools.partial(self._run, answers)
        return on_automatic_axes(run, arguments, (params, state, workspace, None))

    def finish(
        self, params: PyTree, state: PyTree, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        """Applies the update that the last step deferred; nothing if there is none.

        Call it before parameters or state are used for anything but the next step: to
        evaluate, to save, to end. Training goes on with what it returns.

        Args:
          params: The parameters that the step returned.
          state: The state that it returned.
          workspace: The workspace that it returned, of which `rest` was given to
            `GradientWorkspace.allocate`.

        Returns:
          The new parameters, state and workspace. Compile it with `jit_step`, or
          `jax.jit`, and donate all three.

        Raises:
          ValueError: When traced, if the workspace is none of deferred updates, or of
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
        arguments = from_numpy(params), state, workspace
        warn_of_options(arguments)
        return on_automatic_axes(self._finish, arguments, arguments)

    def _run(
        self,
        answers: Sequence[Answer],
        params: PyTree,
        state: PyTree,
        workspace: GradientWorkspace,
        batch: PyTree,
        frozen: PyTree,
    ) -> tuple[PyTree, PyTree, GradientWorkspace, LayerwiseOutput]:
        accumulate = self._accumulate
        if accumulate:
            refuse_other_counts(batch)
        partition, guard, clipping = self._partitioned(params, state, workspace)
        kind = BackwardUpdate if workspace.host is None else HostGradients
        if deferred := workspace.pending is not None:
            kind = DeferredUpdate
        if frozen is not None:
            frozen = Frozen.of(frozen, self._layers, length_of(partition.layers))
        model = self._model.functions(partition, frozen, self._activations_on_host)
        model = on_explicit_axes(model, partition, batch, accumulate)
        run = lambda optimizer: kind(
            model, partition, optimizer, clipping, accumulate, guard
        )(workspace, batch)
        in_turn = _optimizer(params, partition, guard, workspace, self._layer_tree)
        warn_of_moved(answers, workspace)
        # If a separate backward pass finds the norm, nothing overlaps. The gradients of
        # two layers would take more memory than that first pass.
        waits = workspace.host is not None or clipping.needed_first
        guard.refuse_unknown(waits)
        if (accumulate if deferred else waits) or not in_turn.can_overlap:
            return run(in_turn)
        overlapped = in_turn
        if not accumulate and not clipping.by_layer:
            chunked = chunked_leaves(model.run_prologue, in_turn.layered, batch)
            with contextlib.suppress(ValueError):  # a choice by shape, of no layer
                overlapped = _optimizer(
                    params, partition, guard, workspace, self._layer_tree, chunked
                )
        overlapped = dataclasses.replace(overlapped, overlaps=True)
        # Traced once for both names of a GPU.
        on_gpu = jax.jit(functools.partial(run, overlapped), inline=True)
        ways = {name: on_gpu for name in _OVERLAPPED}
        return lax.platform_dependent(default=functools.partial(run, in_turn), **ways)

    def _finish(
        self, params: PyTree, state: PyTree, workspace: GradientWorkspace
    ) -> tuple[PyTree, PyTree, GradientWorkspace]:
        partition, guard, clipping = self._partitioned(params, state, workspace)
        if workspace.pending is None:
            raise ValueError(
                "workspace has nothing to finish: only updates by a workspace that is"
                " allocated with rest= and host_dtype= are deferred."
            )
        optimizer = _optimizer(params, partition, guard, workspace, self._layer_tree)
        model = self._model.functions(partition, None, self._activations_on_host)
        step = DeferredUpdate(model, partition, optimizer, clipping, False, guard)
        warn_of_moved(ask(guard.tx, params, guard.state, self._layer_tree), workspace)
        return step.finish(workspace)

    def _partitioned(
        self, params: PyTree, state: PyTree, workspace: GradientWorkspace
    ) -> tuple[Partition, Guard, Clipping]:
        """The model's parameters, what guards a step, and how gradients are clipped."""
        partition = Partition.of(params, self._layers)
        refuse_integers(params)
        if not isinstance(workspace, GradientWorkspace):
            raise TypeError(
                f"workspace is of type {type(workspace).__name__}: pass what"
                " GradientWorkspace.allocate(params['layers']) makes, or what is"
                " restored with abstract_state(workspace, params) as the target."
            )
        refuse_one_by_one(partition.layers)
        workspace.check(partition.layers, partition.rest)
        refuse_other_state(self._tx, params, state, self._layer_tree)
        guard = Guard.of(self._tx, state)
        tests_finite = guard.wrapper is not None
        dtype = widest(partition.rest, workspace.gradients)
        clipping = Clipping(self._max_norm, self._clip, dtype, tests_finite)
        if workspace.pending is not None and clipping.by_layer:
            raise ValueError(
                "clip='layer' with a workspace of deferred updates: a layer's own norm"
                " is known with the layer's gradients, and nothing need be deferred."
                " Allocate the workspace without rest=."
            )
        return partition, guard, clipping


def _optimizer(
    params: PyTree,
    partition: Partition,
    guard: Guard,
    workspace: GradientWorkspace,
    tree: LayerTree | None,
    chunked: Sequence[int] = (),
) -> LayerOptimizer:
    layered = LayeredState(params, partition, guard.state, chunked)
    pending = workspace.pending
    happens = True if pending is None else pending.waits
    return LayerOptimizer.of(guard.tx, layered, workspace.gradients, happens, tree)
