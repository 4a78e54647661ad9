"""`jit_step`: jit with every placement stated and every donation checked."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from paged_optax.memory import PINNED_HOST, on_host

_keystr = jax.tree_util.keystr


class DonationError(ValueError):
    """A donated buffer would not be reused."""


class Step:
    """A compiled training step. Call it with arguments like the example's.

    Attributes:
      compiled: What XLA made of it, for `memory_report`.
    """

    def __init__(self, compiled: jax.stages.Compiled):
        self.compiled = compiled

    def __call__(self, *args: Any) -> Any:
        """Runs the step; donated arguments must not be used again."""
        return self.compiled(*args)


def jit_step(
    step: Callable[..., Any],
    *example_args: Any,
    donate_argnums: int | Iterable[int] = (),
) -> Step:
    """Compiles a training step with its outputs' placements stated.

    `jax.jit` pairs donated buffers with outputs by shape and order alone where no
    placement is stated (jax 0.10.2 to 0.12.0.1): a step that takes `(state, params)`
    and returns `(params, state)` can put the parameters in host memory. Here each
    output's memory is read off the traced step and stated, and each donated buffer
    is looked up in the compiled program.

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
    # Unused arguments stay, so that a parameter's number is its leaf's.
    jitted = jax.jit(
        step,
        donate_argnums=donated,
        out_shardings=_placements(step, example_args),
        keep_unused=True,
    )
    compiled = jitted.lower(*example_args).compile()
    _check_donations(compiled.as_text() or "", example_args, donated)
    return Step(compiled)


def _placements(step: Callable[..., Any], example_args: tuple[Any, ...]) -> Any:
    """The sharding of every output, its memory kind among them."""
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(*example_args)
    hosts = [on_host(x) for x in closed.out_avals]
    shardings = {
        sharding
        for x in jax.tree.leaves(example_args)
        if isinstance(sharding := getattr(x, "sharding", None), Sharding)
    }
    devices = {device for sharding in shardings for device in sharding.device_set}
    if len(devices) <= 1:
        device = next(iter(devices), jax.devices()[0])
        kinds = [PINNED_HOST if host else None for host in hosts]
        stated = [SingleDeviceSharding(device, memory_kind=kind) for kind in kinds]
    else:
        # Let the compiler choose the layout over devices first, with nothing donated
        # and so nothing to confuse; then state what it chose.
        chosen = jax.jit(step).lower(*example_args).compile().output_shardings
        stated = [
            sharding.with_memory_kind(PINNED_HOST) if host else sharding
            for sharding, host in zip(jax.tree.leaves(chosen), hosts, strict=True)
        ]
    return jax.tree.unflatten(jax.tree.structure(shapes), stated)


def _check_donations(hlo: str, args: tuple[Any, ...], donated: tuple[int, ...]) -> None:
    header = hlo[: hlo.find("\n\n")]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    reused = {
        int(number)
        for number in re.findall(r": \((\d+),", aliases[1] if aliases else "")
    }
    flat = jax.tree_util.tree_flatten_with_path(args)[0]
    lost = [
        (path, leaf)
        for number, (path, leaf) in enumerate(flat)
        if path[0].idx in donated and number not in reused and leaf.size
    ]
    if lost:
        names = ", ".join(
            f"argument {path[0].idx}{_keystr(path[1:])} ({jax.typeof(leaf)})"
            for path, leaf in lost[:3]
        )
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {names}. The step must return an array of the same shape, dtype"
            " and memory kind for each donated one; leave the others out of"
            " donate_argnums."
        )
