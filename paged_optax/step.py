"""`jit_step`: jit with every placement stated and every donation checked."""

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import (
    SingleDeviceSharding,
)

from paged_optax.host_compute import warn_of_host_compute
from paged_optax.memory import memory_kind, memory_kinds, mistyped, on_host
from paged_optax.sharding import typed_by_memory

_keystr = jax.tree_util.keystr


class DonationError(ValueError):
    """A donated buffer would not be reused."""


class Step:
    """A compiled training step. Call it with arguments like the example's.

    Attributes:
      compiled: What XLA made of it, for `memory_report`.
    """

    def __init__(self, compiled: jax.stages.Compiled, hosted: list[bool]):
        self.compiled = compiled
        self._hosted = hosted

    def __call__(self, *args: Any) -> Any:
        """Runs the step; donated arguments must not be used again."""
        try:
            return self.compiled(*args)
        except (TypeError, ValueError):
            _refuse_moved(args, self._hosted)
            raise


def jit_step(
    step: Callable[..., Any],
    *example_args: Any,
    donate_argnums: int | Iterable[int] = (),
) -> Step:
    """Compiles a training step with its outputs' placements stated.

    `jax.jit` pairs donated buffers with outputs by shape and order alone where no
    placement is stated (jax 0.10.2 to 0.12.0.1): a program that is given a state and
    holds no `update` can return parameters in the moments' place. Here each output's
    memory is read off the traced step and stated, and each donated buffer is looked up
    in the compiled program.

    A step that computes on host arrays, as Optax's own wrappers that skip steps do
    around `paged(...)`, is warned of on accelerators; the warning names what to use.

    Args:
      step: A function of pytrees of arrays.
      *example_args: Arguments, or `ShapeDtypeStruct`s that state their shardings.
      donate_argnums: Positions of the arguments whose buffers the step may reuse.

    Returns:
      The compiled step.

    Raises:
      DonationError: If a donated buffer is not reused; the message names the leaf.

    Example:
      >>> import jax, jax.numpy as jnp, optax, paged_optax as po
      >>> tx = po.paged_adamw(1e-3)
      >>> def step(params, state, gradients):
      ...     updates, state = tx.update(gradients, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = {"w": jnp.ones((512, 512))}
      >>> state = tx.init(params)
      >>> step = po.jit_step(step, params, state, params, donate_argnums=(0, 1))
      >>> gradients = {"w": jnp.full((512, 512), 0.5)}
      >>> params, state = step(params, state, gradients)
      >>> params["w"].sharding.memory_kind == jax.devices()[0].default_memory().kind
      True
    """
    donated = (
        (donate_argnums,)
        if isinstance(donate_argnums, int)
        else tuple(sorted(set(donate_argnums)))
    )
    for position in donated:
        if not 0 <= position < len(example_args):
            raise ValueError(
                f"donate_argnums={donate_argnums} names argument {position}, and the"
                f" step has {len(example_args)}."
            )
    example_args = jax.tree.map(_typed, example_args)
    hosted = [on_host(x) or mistyped(x) for x in jax.tree.leaves(example_args)]
    _refuse_moved(example_args, hosted)
    inputs, outputs = _placements(step, example_args, donated)
    # Unused arguments stay, so that a parameter's number is its leaf's.
    jitted = jax.jit(
        step,
        donate_argnums=donated,
        in_shardings=inputs,
        out_shardings=outputs,
        keep_unused=True,
    )
    with warnings.catch_warnings():
        # JAX only warns of what is an error here, and names no leaf.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        compiled = jitted.lower(*example_args).compile()
    _check_donations(compiled, example_args, donated)
    return Step(compiled, hosted)


def _refuse_moved(args: tuple[Any, ...], hosted: list[bool]) -> None:
    """Names an array whose type says that it is on the device, and belongs elsewhere.

    Args:
      args: Arguments of a step.
      hosted: For each of their arrays whether it belongs on the host.
    """
    flat = jax.tree_util.tree_flatten_with_path(args)[0]
    for (path, x), host in zip(flat, hosted, strict=False):
        if host and not on_host(x):
            raise ValueError(
                f"argument {path[0].idx}{_keystr(path[1:])} belongs in host memory, and"
                f" has the type of device memory ({jax.typeof(x)}): a restore or a"
                " jax.device_put without a memory kind did that. Put the state back by"
                " paged_optax.place_state(tx, state, params)."
            )


def _typed(x: Any) -> Any:
    """A `ShapeDtypeStruct` whose memory shows in its type."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None:
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed_by_memory(x.sharding))


def _placements(
    step: Callable[..., Any], args: tuple[Any, ...], donated: tuple[int, ...]
) -> tuple[Any, Any]:
    """The shardings of all arguments and of all results, memory kinds among them."""
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)
    committed = [
        x.sharding
        if getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct))
        else None
        for x in jax.tree.leaves(args)
        if hasattr(x, "sharding")
    ]
    devices = {d for sharding in committed if sharding for d in sharding.device_set}
    warn_of_host_compute(closed, next(iter(devices), jax.devices()[0]).platform)

    if len(devices) <= 1:
        # Arguments are stated too, also those not committed to a device: JAX pairs an
        # input of unstated memory with any output of its shape.
        device = next(iter(devices), jax.devices()[0])
        alone = lambda x: SingleDeviceSharding(device, memory_kind=memory_kind(x))
        stated = [alone(x) for x in closed.out_avals]
        return jax.tree.map(alone, args), jax.tree.unflatten(structure, stated)
    # Let the compiler choose the layout over devices first, with nothing donated and
    # so nothing to confuse; then state what it chose.
    chosen = jax.jit(step, keep_unused=True).lower(*args).compile()
    place = lambda sharding, x: sharding.with_memory_kind(memory_kind(x))
    inputs = map(place, jax.tree.leaves(chosen.input_shardings), jax.tree.leaves(args))
    inputs = jax.tree.unflatten(jax.tree.structure(args), list(inputs))
    outputs = map(place, jax.tree.leaves(chosen.output_shardings), closed.out_avals)
    outputs = jax.tree.unflatten(structure, list(outputs))
    return inputs, _given_back(args, inputs, shapes, outputs, donated)


def _given_back(
    args: tuple[Any, ...],
    inputs: tuple[Any, ...],
    results: Any,
    outputs: Any,
    donated: tuple[int, ...],
) -> Any:
    """The results' shardings, where one is like a donated argument that argument's.

    The compiler may divide parameters that it updates otherwise than it was given them;
    then no buffer would serve again, and the next step not take them.
    """
    describe = lambda tree: (
        jax.tree.structure(tree),
        [(x.shape, x.dtype) for x in jax.tree.leaves(tree)],
    )
    left = [(describe(args[i]), inputs[i]) for i in donated]

    def choose(result: Any, chosen: Any) -> Any:
        found = next((given for given in left if given[0] == describe(result)), None)
        if found is None:
            return chosen
        left.remove(found)
        return found[1]

    if type(results) in (tuple, list):
        return type(results)(map(choose, results, outputs))
    return choose(results, outputs)


def _check_donations(
    compiled: jax.stages.Compiled, args: tuple[Any, ...], donated: tuple[int, ...]
) -> None:
    """Looks every donated buffer up among the aliases of the compiled program."""
    text = compiled.as_text() or ""
    header = text[: text.find("\n\n")]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", aliases[1] if aliases else "")
    kinds = [
        sharding.memory_kind or memory_kinds()[0]
        for sharding in jax.tree.leaves(compiled.output_shardings)
    ]
    reused = {int(number): kinds[int(output or 0)] for output, number in pairs}
    lost = []
    for number, (path, leaf) in enumerate(
        jax.tree_util.tree_flatten_with_path(args)[0]
    ):
        kept = reused.get(number) == memory_kind(leaf)
        # A Python number has no buffer to lose.
        if path[0].idx in donated and getattr(leaf, "size", 0) and not kept:
            lost.append(
                f"argument {path[0].idx}{_keystr(path[1:])} ({jax.typeof(leaf)})"
            )
    if lost:
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {', '.join(lost[:3])}. The step must return an array of the same"
            " shape, dtype and memory kind for each donated one; leave the others out"
            " of donate_argnums."
        )
