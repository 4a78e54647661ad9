"""`jit_step`: a step compiled with every donation checked."""

import contextlib
import contextvars
import functools
import types
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Sharding
from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import (
    NO_OVERLAP,
    PIPELINED,
    addressing_options,
)
from paged_optax.backend.memory import (
    donate_within_memory,
    on_host,
    typed_by_memory,
)
from paged_optax.backend.types import is_traced
from paged_optax.backend.user_warnings import warn_user
from paged_optax.compiling.arguments import (
    ArgumentKey,
    Keys,
    Known,
    Leaf,
    differences,
    label,
    leaves_of,
    names_by_position,
    places_of,
    refuse_moved,
    several,
    signature,
    typed,
)
from paged_optax.compiling.donations import (
    KEEP_UNUSED,
    Donated,
    check_donations,
    device_of,
    divide_like,
    is_placed,
    keep_unread,
    note_donated,
    shared_by,
)
from paged_optax.compiling.host_arithmetic import (
    reaches_host,
    refuse_computed_on_host,
    warn_of_host_compute,
)
from paged_optax.compiling.memory_report import compile_overlapping
from paged_optax.transform.checks import note_elsewhere
from paged_optax.transform.context import current, known_shardings, within

_CONFIG: Any = jax.config


class _NotCompiled(BaseException):
    """JAX is about to compile a step that `Step.compile` has not checked."""


_is_checked = contextvars.ContextVar("paged_optax.jit_step", default=False)


@contextlib.contextmanager
def _checked() -> Generator[None]:
    """Lets JAX trace and compile steps, without the warnings that are seen to."""
    token = _is_checked.set(True)
    try:
        with warnings.catch_warnings():
            # JAX only warns of what is an error here, and names no leaf.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            # `compile_overlapping` passes the options that these name.
            warnings.filterwarnings("ignore", NO_OVERLAP)
            warnings.filterwarnings("ignore", PIPELINED)
            yield
    finally:
        _is_checked.reset(token)


def _divided(leaves: Sequence[PyTree]) -> contextlib.AbstractContextManager[None]:
    """Has JAX trace by the arguments' shardings, if any is on several devices."""
    places = places_of(leaves)
    return within(places=places) if places else contextlib.nullcontext()


class Step:
    """A training step under `jax.jit`, whose caches alone keep its programs.

    Within another function that JAX transforms, such as `jax.jit` or `jax.grad`, it is
    `jax.jit` of the step, which donates nothing there.

    Attributes:
      compiled: The program for the first arguments, for `memory_report`; None before
        the first call. `compile` returns the program for other arguments.
    """

    compiled: Compiled | None = None

    def __init__(self, step: Callable[..., PyTree], donated: Keys, static: Keys):
        self._step, self._donated, self._static = step, donated, static
        self._signature = signature(step)
        self._static_keys = {name for key in static for name in self._names(key)}
        self._donated_keys = {name for key in donated for name in self._names(key)}
        self._donated_keys -= self._static_keys
        # The leaves of the first arguments by their names in messages.
        self._before: dict[str, Known] = {}
        self._shardings: list[Sharding] = []
        self._travels = False
        self._renew()
        self._nested = self._jit_of(lambda *args, **kwargs: step(*args, **kwargs))
        functools.update_wrapper(self, step, updated=())

    def __reduce__(self) -> tuple[Any, ...]:
        return Step, (self._step, self._donated, self._static)

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> "Step | types.MethodType":
        """Binds a step that is a method to its object."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the step; donated arguments must not be used again.

        It compiles where `jax.jit` does: for other shapes, dtypes, structures,
        placements and constants, and within another mesh or configuration of JAX.

        If it fails, a note on the error says which donated arguments are gone.
        """
        leaves = jax.tree.leaves((args, kwargs))
        traced = any(issubclass(kind, Tracer) for kind in set(map(type, leaves)))
        if traced or _CONFIG.jax_disable_jit:
            return self._nested(*args, **kwargs)
        self._refuse_unhashable(args, kwargs)
        try:
            committed = {getattr(x, "committed", False) for x in leaves}
            if (
                self._donated_keys
                and committed != {True}
                and (len(committed) > 1 or self._shardings)
            ):
                args, kwargs = self._placed(args, kwargs, leaves)
                leaves = jax.tree.leaves((args, kwargs))
            with _divided(leaves), contextlib.suppress(_NotCompiled):
                if self.compiled is not None:
                    return self._jitted(*args, **kwargs)
            # Where JAX traces, constants alone are no tracers.
            if is_traced(jnp.zeros(1)):
                return self._nested(*args, **kwargs)
            self._compile(args, kwargs)
            # After an error, as `_NotCompiled`, JAX would for ever call such arguments
            # by way of Python.
            self._jitted._clear_cache()
            with _divided(leaves), _checked():
                return self._jitted(*args, **kwargs)
        except BaseException as error:
            note_donated(error, self._donated_of(args, kwargs))
            raise

    def compile(self, *args: PyTree, **kwargs: PyTree) -> Compiled:
        """The program for arguments like these, compiled unless it already is."""
        self._refuse_unhashable(args, kwargs)
        args, kwargs = jax.tree.map(typed, (args, kwargs))
        leaves = jax.tree.leaves((args, kwargs))
        return self._compile(*self._placed(args, kwargs, leaves))

    def _renew(self) -> None:
        """Lets JAX forget the step's programs, and what it traced of them."""

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return self._traced(args, kwargs)

        run.__name__ = getattr(self._step, "__name__", "step")
        positions, names = _split(self._donated_keys)
        self._jit = functools.cache(
            lambda **options: self._jit_of(
                run,
                donate_argnums=positions,
                donate_argnames=names,
                keep_unused=KEEP_UNUSED,
                compiler_options=options or None,
            )
        )
        self._jitted: Any = self._jit()

    def _jit_of(self, run: Callable[..., PyTree], **options: Any) -> Wrapped:
        positions, names = _split(self._static_keys)
        return jax.jit(run, static_argnums=positions, static_argnames=names, **options)

    def _placed(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        leaves: Sequence[PyTree],
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments, with donated arrays committed to the devices of the others.

        A step's results are: `jax.jit` would compile for these, and again for them.
        """
        given = jax.tree.leaves(self._donated_of(args, kwargs))
        if all(map(is_placed, given)):
            return args, kwargs
        shardings = [x.sharding for x in leaves if is_placed(x)]
        sharding = shared_by(shardings or self._shardings)
        if sharding is None:
            return args, kwargs
        leaves = [
            x.value
            if is_placed(x.value) or x.key not in self._donated_keys
            else self._commit(x, sharding)
            for x in leaves_of(args, kwargs)
        ]
        return jax.tree.unflatten(jax.tree.structure((args, kwargs)), leaves)

    def _commit(self, leaf: Leaf, sharding: Sharding) -> PyTree:
        known = self._before.get(leaf.name)
        if known and known.has_place_for(leaf.value) and known.sharding is not None:
            sharding = typed_by_memory(known.sharding)
        if isinstance(x := leaf.value, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        # It shares the buffer of an array that is on this device already.
        return jax.device_put(x, sharding)

    def _compile(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Compiled:
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)
        leaves = [x for x in leaves_of(args, kwargs) if x.key not in self._static_keys]
        values = [x.value for x in leaves]
        self._refuse_missing(args, kwargs)
        refuse_moved(leaves, self._before)
        traced = None
        try:
            with _divided(jax.tree.leaves((args, kwargs))), _checked():
                traced = self._jitted.trace(*args, **kwargs)
                shardings = [x.sharding for x in values if is_placed(x)]
                device: Any = device_of(shardings)
                self._travels |= reaches_host(traced.jaxpr)
                warn_of_host_compute(traced.jaxpr, device.platform)
                if not (self._donated or self._before) and any(map(on_host, values)):
                    warn_user(
                        "nothing is donated, so a step leaves the old parameters and"
                        " moments beside the new: name them in donate_argnums or"
                        " donate_argnames."
                    )
                # Without transfers nothing is to overlap, and CUDA graphs are faster.
                device, fixed = (
                    (device, addressing_options(device))
                    if self._travels
                    else (None, {})
                )
                jit = lambda options: self._jit(**options, **fixed)
                jitted, compiled = compile_overlapping(jit, args, device, kwargs)
            check_donations(compiled, leaves, self._donated_keys)
        except Exception as error:
            # JAX must not run what it traced for arguments that are refused here.
            if traced is not None:
                self._renew()
            if isinstance(error, ValueError):
                note_elsewhere(error)
            if self._before:
                others = differences(leaves, self._before)
                others = others or ["in other places, or with other constants"]
                error.add_note(
                    "The step was compiled before, for other arguments:"
                    f" {', '.join(others[:3])}."
                )
            refuse_computed_on_host(error, {x.name: x.value for x in leaves})
            raise
        self._jitted = jitted
        if self.compiled is None:
            self.compiled = compiled
            self._shardings = shardings
            self._before = {
                name: Known(jax.typeof(x), getattr(x, "sharding", None))
                for _, name, x in leaves
            }
        return compiled

    def _traced(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        """Traces the step, with its donated buffers kept and its results divided."""
        if not _is_checked.get():
            raise _NotCompiled
        leaves, structure = leaves_of(args, kwargs), jax.tree.structure((args, kwargs))
        shardings = current().places or (None,) * len(leaves)
        pairs = zip(leaves, shardings, strict=True)
        arrays = [(x, at) for x, at in pairs if x.key not in self._static_keys]
        constants = [x if x.key in self._static_keys else None for x in leaves]
        places = [at for _, at in arrays]

        def step(*values: PyTree) -> PyTree:
            rest = iter(values)
            flat = [next(rest) if x is None else x.value for x in constants]
            # Tracers of automatic axes have no sharding: an update inside reads it from
            # the context.
            with within(places=()), known_shardings(values, places):
                args, kwargs = jax.tree.unflatten(structure, flat)
                return self._step(*args, **kwargs)

        step = jax.jit(step, inline=True)
        values = [x.value for x, _ in arrays]
        donated = [x.key in self._donated_keys for x, _ in arrays]
        jaxpr = step.trace(*values).jaxpr
        results = step(*keep_unread(jaxpr, values, donated))
        given = self._donated_of(args, kwargs)
        results = divide_like(
            results,
            [
                Donated(value, [at for x, at in arrays if x.key == key])
                for key, value in given.items()
            ]
            if any(places)
            else (),
        )
        # JAX pairs donated arguments with results of any memory.
        return donate_within_memory(results) if given else results

    def _donated_of(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> dict[ArgumentKey, PyTree]:
        given = dict(enumerate(args)) | kwargs
        return {key: x for key, x in given.items() if key in self._donated_keys}

    def _refuse_unhashable(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> None:
        given = dict(enumerate(args)) | kwargs if self._static_keys else {}
        for key in self._static_keys & given.keys():
            if not isinstance(given[key], Hashable):
                raise TypeError(
                    f"static {label(key)} is of type {type(given[key]).__name__}, which"
                    " has no hash: a static argument is a constant of the program."
                )

    def _refuse_missing(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> None:
        given = [*range(len(args)), *sorted(kwargs)]
        given = [key for key in given if key not in self._static_keys]
        for key in self._donated:
            if self._names(key).isdisjoint(given):
                which = "donate_argnums" if isinstance(key, int) else "donate_argnames"
                raise ValueError(
                    f"{which} names argument {key!r}, which the step is not given as an"
                    f" array: it has {self._named(given)}."
                )

    def _named(self, keys: Iterable[ArgumentKey]) -> str:
        """The number of arguments and their names, for messages."""
        names = names_by_position(self._signature)
        named: dict[ArgumentKey, str] = {
            i: f"{i} is {name!r}" for i, name in enumerate(names) if name
        }
        each = [named.get(key, str(key)) for key in keys]
        count = f"{len(each)} argument{'' if len(each) == 1 else 's'}"
        return f"{count}: {', '.join(each)}" if each else count

    def _names(self, key: ArgumentKey) -> set[ArgumentKey]:
        """An argument's position and its name: it may be given by either."""
        names = names_by_position(self._signature)
        if isinstance(key, str):
            return {key} | {i for i, name in enumerate(names) if name == key}
        return {key} | {name for name in names[key : key + 1] if name and key >= 0}


def _split(keys: Iterable[ArgumentKey]) -> tuple[list[int], list[str]]:
    """Positions and names, as `jax.jit` takes them."""
    positions = sorted(key for key in keys if isinstance(key, int) and key >= 0)
    return positions, sorted(key for key in keys if isinstance(key, str))


@overload
def jit_step(
    step: None = None,
    /,
    *,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
) -> Callable[[Callable[..., PyTree]], Step]: ...


@overload
def jit_step(
    step: Callable[..., PyTree],
    /,
    *example_args: PyTree,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    **example_kwargs: PyTree,
) -> Step: ...


def jit_step(
    step: Callable[..., PyTree] | None = None,
    /,
    *example_args: PyTree,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    **example_kwargs: PyTree,
) -> Step | Callable[[Callable[..., PyTree]], Step]:
    """Compiles a training step with its outputs' placements stated.

    It is one `jax.jit`: JAX's own caches keep its programs, and within `jax.jit`,
    `jax.grad` or `jax.vmap` it is `jax.jit` of the step. A step returns what it
    changes, NNX modules too: `nnx.jit` writes them back by itself, this does not.

    `jax.jit` pairs donated buffers with outputs by shape and order alone where no
    placement is stated (jax 0.10.2 to 0.12.0.1): a program that is given a state and
    holds no `update` can return parameters in the moments' place. Here buffers are
    paired within a memory, and each donated one is looked up in the compiled program.

    A step that computes on host arrays, as Optax's own wrappers that skip steps do
    around `paged(...)`, is warned of on accelerators; the warning names what to use.

    Args:
      step: A function of pytrees of arrays. Left out, a decorator is returned.
      *example_args: Arguments, or `ShapeDtypeStruct`s that state their shardings. With
        none the step is compiled when it is first called.
      donate_argnums: Positions of the arguments whose buffers the step may reuse.
      donate_argnames: Their names.
      static_argnums: Positions of arguments that are constants of the program. They
        are hashable.
      **example_kwargs: Arguments by name.

    Returns:
      The compiled `Step`, or a decorator that makes one. Its `compiled` is the program
      of the first arguments, and `compile(*args)` gives that of others.

    Raises:
      DonationError: If a donated buffer is not reused; the message names the leaf.
      ValueError: If the step is not given an argument that is to be donated.

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
    donated = (*several(donate_argnums), *several(donate_argnames))
    static = several(static_argnums)
    if any(isinstance(key, int) and key < 0 for key in static):
        raise ValueError(f"static_argnums={static_argnums} counts from the first, 0.")
    examples = bool(example_args or example_kwargs)
    if step is None and not examples:
        return lambda step: Step(step, donated, static)
    if not callable(step):
        named = ", ".join(f"{name}=" for name in example_kwargs)
        raise TypeError(
            f"step={step!r:.80} is no function: the step is a function, and comes"
            " first, as in jit_step(step, params, state, donate_argnums=(0, 1))."
            + f" {named} would be an argument of the step."
            * bool(named)
        )
    jitted = Step(step, donated, static)
    if examples:
        jitted.compile(*example_args, **example_kwargs)
    return jitted
