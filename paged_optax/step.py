"""`jit_step`: jit with every placement stated and every donation checked."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import jax
from jax.sharding import (
    SingleDeviceSharding,
)

from paged_optax.host_compute import warn_of_host_compute
from paged_optax.memory import memory_kind, memory_kinds, mistyped, on_host
from paged_optax.sharding import typed_by_memory

#: The position of an argument, or the name of one that has none.
_Key = int | str
_Keys = tuple[_Key, ...]

_keystr = jax.tree_util.keystr


class DonationError(ValueError):
    """A donated buffer would not be reused."""


class Step:
    """A training step, compiled for arguments like those it was first given.

    Attributes:
      compiled: What XLA made of it, for `memory_report`; None before there was a call.
    """

    compiled: jax.stages.Compiled | None = None

    def __init__(self, step: Callable[..., Any], donated: _Keys, static: _Keys):
        self._step = step
        self._donated = donated
        self._static = static
        functools.update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; donated arguments must not be used again."""
        given = _by_key(self._step, args, kwargs)
        if self.compiled is None:
            self._compile(given)
        assert self.compiled is not None
        static = {key: given.pop(key) for key in self._static if key in given}
        if static != self._constant or tuple(given) != self._keys:
            raise TypeError(
                f"the step was compiled for the arguments {self._keys} and the static"
                f" ones {self._constant}, and is called with {tuple(given)} and"
                f" {static}: make another step for these."
            )
        values = tuple(given.values())
        try:
            return self.compiled(*values)
        except (TypeError, ValueError):
            _refuse_moved(values, self._keys, self._hosted)
            raise

    def _compile(self, given: Mapping[_Key, Any]) -> None:
        """Compiles for arguments like these."""
        self._constant = {key: given[key] for key in self._static if key in given}
        examples = {key: x for key, x in given.items() if key not in self._constant}
        self._keys = tuple(examples)
        donated = self._positions()
        values = jax.tree.map(_typed, tuple(examples.values()))
        self._hosted = [on_host(x) or mistyped(x) for x in jax.tree.leaves(values)]
        _refuse_moved(values, self._keys, self._hosted)
        if any(self._hosted) and not donated:
            warnings.warn(
                "nothing is donated, so a step leaves the old parameters and moments"
                " beside the new: name them in donate_argnums or donate_argnames.",
                stacklevel=3,
            )
        inputs, outputs = _placements(self._call, values, donated)
        # Unused arguments stay, so that a parameter's number is its leaf's.
        jitted = jax.jit(
            self._call,
            donate_argnums=donated,
            in_shardings=inputs,
            out_shardings=outputs,
            keep_unused=True,
        )
        with warnings.catch_warnings():
            # JAX only warns of what is an error here, and names no leaf.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            compiled = jitted.lower(*values).compile()
        _check_donations(compiled, values, self._keys, donated)
        self.compiled = compiled

    def _call(self, *values: Any) -> Any:
        """Calls the step with the values of `_keys` and what is static."""
        given = self._constant | dict(zip(self._keys, values, strict=True))
        positions = sorted(key for key in given if isinstance(key, int))
        named = {key: x for key, x in given.items() if isinstance(key, str)}
        return self._step(*(given[key] for key in positions), **named)

    def _positions(self) -> tuple[int, ...]:
        """Where the donated arguments stand among `_keys`."""
        parameters = _parameters(self._step)
        found = set()
        for key in self._donated:
            # An argument may be given by its name, and be named by its position.
            names = {key}
            if isinstance(key, str) and key in parameters:
                names.add(parameters.index(key))
            elif isinstance(key, int) and 0 <= key < len(parameters):
                names.add(parameters[key])
            found |= {i for i, one in enumerate(self._keys) if one in names}
            if names.isdisjoint(self._keys):
                which = "donate_argnums" if isinstance(key, int) else "donate_argnames"
                has = ", ".join(map(_label, self._keys))
                raise ValueError(
                    f"{which} names argument {key!r}, which the step is not given: it"
                    f" has {len(self._keys)} arguments, {has}."
                )
        return tuple(sorted(found))


@overload
def jit_step(
    step: None = None,
    *,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
) -> Callable[[Callable[..., Any]], Step]: ...


@overload
def jit_step(
    step: Callable[..., Any],
    *example_args: Any,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    **example_kwargs: Any,
) -> Step: ...


def jit_step(
    step: Callable[..., Any] | None = None,
    *example_args: Any,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    **example_kwargs: Any,
) -> Step | Callable[[Callable[..., Any]], Step]:
    """Compiles a training step with its outputs' placements stated.

    `jax.jit` pairs donated buffers with outputs by shape and order alone where no
    placement is stated (jax 0.10.2 to 0.12.0.1): a program that is given a state and
    holds no `update` can return parameters in the moments' place. Here each output's
    memory is read off the traced step and stated, and each donated buffer is looked up
    in the compiled program.

    A step that computes on host arrays, as Optax's own wrappers that skip steps do
    around `paged(...)`, is warned of on accelerators; the warning names what to use.

    Args:
      step: A function of pytrees of arrays. Left out, a decorator is returned.
      *example_args: Arguments, or `ShapeDtypeStruct`s that state their shardings. With
        none the step is compiled when it is first called.
      donate_argnums: Positions of the arguments whose buffers the step may reuse.
      donate_argnames: Their names.
      static_argnums: Positions of arguments that are no arrays: each is what it was
        when the step was compiled.
      **example_kwargs: Arguments by name.

    Returns:
      The compiled `Step`, or a decorator that makes one.

    Raises:
      DonationError: If a donated buffer is not reused; the message names the leaf.
      ValueError: If an argument is to be donated that the step is not given.

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

      As a decorator, compiled at the first call:

      >>> @po.jit_step(donate_argnames=("params", "state"))
      ... def step(params, state, *, scale):
      ...     gradients = jax.tree.map(lambda p: scale * p, params)
      ...     updates, state = tx.update(gradients, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = step(params, state, scale=0.5)
    """
    donated = (*_several(donate_argnums), *_several(donate_argnames))
    static = _several(static_argnums)
    if step is None:
        return lambda step: Step(step, donated, static)
    made = Step(step, donated, static)
    if example_args or example_kwargs:
        made._compile(_by_key(step, example_args, example_kwargs))
    return made


def _several(keys: Any) -> _Keys:
    return (keys,) if isinstance(keys, int | str) else tuple(dict.fromkeys(keys))


def _label(key: _Key) -> str:
    return f"argument {key}"


def _parameters(step: Callable[..., Any]) -> list[str]:
    """The names of its arguments; none if Python does not know them."""
    try:
        return list(inspect.signature(step).parameters)
    except ValueError:
        return []


def _by_key(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[_Key, Any]:
    """Arguments by position, and by name where they have none.

    Raises:
      TypeError: If they are not what the step takes.
    """
    try:
        bound = inspect.signature(step).bind(*args, **kwargs)
    except ValueError:  # Python does not know what it takes
        return dict(enumerate(args)) | kwargs
    return dict(enumerate(bound.args)) | dict(sorted(bound.kwargs.items()))


def _refuse_moved(
    args: tuple[Any, ...], keys: Sequence[_Key], hosted: Sequence[bool]
) -> None:
    """Names an array whose type says that it is on the device, and belongs elsewhere.

    Args:
      args: Arguments of a step.
      keys: Their positions or names.
      hosted: For each of their arrays whether it belongs on the host.
    """
    flat = jax.tree_util.tree_flatten_with_path(args)[0]
    for (path, x), host in zip(flat, hosted, strict=False):
        if host and not on_host(x):
            where = f"{_label(keys[path[0].idx])}{_keystr(path[1:])}"
            raise ValueError(
                f"{where} belongs in host memory, and has the type of device memory"
                f" ({jax.typeof(x)}): a restore or a jax.device_put without a memory"
                " kind did that. Put the state back by"
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
    compiled: jax.stages.Compiled,
    args: tuple[Any, ...],
    keys: Sequence[_Key],
    donated: tuple[int, ...],
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
            where = f"{_label(keys[path[0].idx])}{_keystr(path[1:])}"
            lost.append(f"{where} ({jax.typeof(leaf)})")
    if lost:
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {', '.join(lost[:3])}. The step must return an array of the same"
            " shape, dtype and memory kind for each donated one; leave the others out"
            " of donate_argnums and donate_argnames."
        )
