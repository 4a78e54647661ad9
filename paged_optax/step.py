"""`jit_step`: jit with every placement stated and every donation checked."""

import functools
import inspect
import re
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

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


class _Made(NamedTuple):
    """A step compiled for some arguments.

    Attributes:
      compiled: What XLA made of it.
      keys: The arguments that are arrays.
      static: Those that are not, and their values.
      structure: The tree of the arrays.
      hosted: For each array whether it belongs on the host.
    """

    compiled: jax.stages.Compiled
    keys: _Keys
    static: dict[_Key, Any]
    structure: Any
    hosted: list[bool]


class Step:
    """A training step, compiled for arguments like those it was first given."""

    def __init__(self, step: Callable[..., Any], donated: _Keys, static: _Keys):
        self._step = step
        self._signature = _signature(step)
        self._donated = donated
        self._static = frozenset(name for key in static for name in self._names(key))
        self._made: _Made | None = None
        self._first = threading.Lock()
        functools.update_wrapper(self, step, updated=())

    @property
    def compiled(self) -> jax.stages.Compiled | None:
        """What XLA made of it, for `memory_report`; None before there was a call."""
        return self._made and self._made.compiled

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A step that is a method is given its object."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; donated arguments must not be used again."""
        given = self._by_key(args, kwargs)
        if self._made is None:
            with self._first:
                self._made = self._made or self._compiled_for(given)
        made, static = self._made, self._taken_out(given)
        if not _same(static, made.static) or tuple(given) != made.keys:
            raise TypeError(
                f"the step was compiled for the arguments {made.keys} and the static"
                f" ones {made.static}, and is called with {tuple(given)} and"
                f" {static}: make another step for these."
            )
        values = tuple(given.values())
        try:
            return made.compiled(*values)
        except (TypeError, ValueError):
            if jax.tree.structure(values) == made.structure:
                _refuse_moved(values, made.keys, made.hosted)
            raise

    def _by_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[_Key, Any]:
        """Arguments by position, and by name where they have none.

        Raises:
          TypeError: If they are not what the step takes.
        """
        if self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        return dict(enumerate(args)) | dict(sorted(kwargs.items()))

    def _taken_out(self, given: dict[_Key, Any]) -> dict[_Key, Any]:
        """The static arguments, no longer among the others."""
        static = {key: given.pop(key) for key in list(given) if key in self._static}
        for key, value in static.items():
            if not isinstance(value, Hashable):
                raise TypeError(
                    f"static {_label(key)} is of type {type(value).__name__}, which has"
                    " no hash: a static argument is a constant of the program."
                )
        return static

    def _compiled_for(self, given: Mapping[_Key, Any]) -> _Made:
        """Compiles for arguments like these."""
        examples = dict(given)
        static = self._taken_out(examples)
        keys = tuple(examples)
        donated = self._positions(keys)
        values = jax.tree.map(_typed, tuple(examples.values()))
        hosted = [on_host(x) or mistyped(x) for x in jax.tree.leaves(values)]
        _refuse_moved(values, keys, hosted)
        if any(hosted) and not donated:
            warnings.warn(
                "nothing is donated, so a step leaves the old parameters and moments"
                " beside the new: name them in donate_argnums or donate_argnames.",
                stacklevel=3,
            )

        # A function of each attempt's own, because JAX keeps what it traced by it.
        def call(*values: Any) -> Any:
            given = static | dict(zip(keys, values, strict=True))
            positions = sorted(key for key in given if isinstance(key, int))
            named = {key: x for key, x in given.items() if isinstance(key, str)}
            return self._step(*(given[key] for key in positions), **named)

        inputs, outputs = _placements(call, values, donated)
        # Unused arguments stay, so that a parameter's number is its leaf's.
        jitted = jax.jit(
            call,
            donate_argnums=donated,
            in_shardings=inputs,
            out_shardings=outputs,
            keep_unused=True,
        )
        with warnings.catch_warnings():
            # JAX only warns of what is an error here, and names no leaf.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            compiled = jitted.lower(*values).compile()
        _check_donations(compiled, values, keys, donated)
        return _Made(compiled, keys, static, jax.tree.structure(values), hosted)

    def _positions(self, keys: _Keys) -> tuple[int, ...]:
        """Where the donated arguments stand among all."""
        found = set()
        for key in self._donated:
            names = self._names(key)
            found |= {i for i, one in enumerate(keys) if one in names}
            if names.isdisjoint(keys):
                which = "donate_argnums" if isinstance(key, int) else "donate_argnames"
                has = ", ".join(map(_label, keys))
                raise ValueError(
                    f"{which} names argument {key!r}, which the step is not given as an"
                    f" array: it has {len(keys)} arguments, {has}."
                )
        return tuple(sorted(found))

    def _names(self, key: _Key) -> set[_Key]:
        """An argument's position and its name: it may be given by either."""
        names = _names_by_position(self._signature)
        if isinstance(key, str):
            return {key} | {i for i, name in enumerate(names) if name == key}
        return {key} | {name for name in names[key : key + 1] if name and key >= 0}


@overload
def jit_step(
    step: None = None,
    /,
    *,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
) -> Callable[[Callable[..., Any]], Step]: ...


@overload
def jit_step(
    step: Callable[..., Any],
    /,
    *example_args: Any,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    **example_kwargs: Any,
) -> Step: ...


def jit_step(
    step: Callable[..., Any] | None = None,
    /,
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
      static_argnums: Positions of arguments that are constants of the program, with a
        hash: each is what it was when the step was compiled.
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
    if any(isinstance(key, int) and key < 0 for key in static):
        raise ValueError(f"static_argnums={static_argnums} counts from the first, 0.")
    examples = bool(example_args or example_kwargs)
    if step is None and not examples:
        return lambda step: Step(step, donated, static)
    if not callable(step):
        raise TypeError(
            f"jit_step is given {type(step).__name__} as the step, and"
            f" {sorted(example_kwargs)} as arguments by name: the step is a function."
        )
    made = Step(step, donated, static)
    if examples:
        made._made = made._compiled_for(made._by_key(example_args, example_kwargs))
    return made


def _several(keys: Any) -> _Keys:
    return (keys,) if isinstance(keys, int | str) else tuple(dict.fromkeys(keys))


def _label(key: _Key) -> str:
    return f"argument {key}"


def _same(one: dict[_Key, Any], other: dict[_Key, Any]) -> bool:
    """Whether two programs have the same constants: 1, 1.0 and True are three."""
    kinds = lambda static: {key: (type(x), x) for key, x in static.items()}
    return kinds(one) == kinds(other)


def _signature(step: Callable[..., Any]) -> inspect.Signature | None:
    """What it takes itself, whatever it wraps; None if Python does not know."""
    try:
        return inspect.signature(step, follow_wrapped=False)
    except ValueError:
        return None


def _names_by_position(signature: inspect.Signature | None) -> list[str]:
    """The names of arguments that have a position; empty where it is all they have."""
    every = signature.parameters.values() if signature else ()
    named, bare = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    return [x.name if x.kind == named else "" for x in every if x.kind in (named, bare)]


def _where(keys: _Keys, path: Any) -> str:
    """A leaf of the arguments, as messages name it."""
    return f"{_label(keys[path[0].idx])}{_keystr(path[1:])}"


def _refuse_moved(args: tuple[Any, ...], keys: _Keys, hosted: Sequence[bool]) -> None:
    """Names an array whose type says that it is on the device, and belongs elsewhere.

    Args:
      args: Arguments of a step.
      keys: Their positions or names.
      hosted: For each of their arrays whether it belongs on the host.
    """
    flat = jax.tree_util.tree_flatten_with_path(args)[0]
    for (path, x), host in zip(flat, hosted, strict=False):
        if host and not on_host(x):
            raise ValueError(
                f"{_where(keys, path)} belongs in host memory, and has the type of"
                f" device memory ({jax.typeof(x)}): a restore or a jax.device_put"
                " without a memory kind did that. Put the state back by"
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
    keys: _Keys,
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
            lost.append(f"{_where(keys, path)} ({jax.typeof(leaf)})")
    if lost:
        raise DonationError(
            f"{len(lost)} donated buffer{'s are' if len(lost) > 1 else ' is'} not"
            f" reused: {', '.join(lost[:3])}. The step must return an array of the same"
            " shape, dtype and memory kind for each donated one; leave the others out"
            " of donate_argnums and donate_argnames."
        )
