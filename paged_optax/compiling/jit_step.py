"""`jit_step`: a step compiled with every donation checked."""

import contextlib
import contextvars
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import (
    NO_OVERLAP,
    PIPELINED,
    SCHEDULED,
    addressing_options,
    overlap_options,
)
from paged_optax.backend.memory import (
    device_memory,
    donate_within_memory,
    on_host,
    typed_by_memory,
)
from paged_optax.backend.text import readable_bytes
from paged_optax.backend.types import is_traced
from paged_optax.backend.user_warnings import warn_user
from paged_optax.compiling.donations import (
    KEEP_UNUSED,
    Chosen,
    argument_leaves,
    check_donations,
    check_not_moved,
    commit_donated,
    divide_like,
    is_placed,
    keep_unread,
    local_device,
    note_donated,
    placed_types,
    sharding_list,
)
from paged_optax.compiling.host_arithmetic import (
    check_host_arithmetic,
    reaches_host,
    warn_of_host_compute,
)
from paged_optax.compiling.memory_report import device_total
from paged_optax.transform.checks import note_elsewhere
from paged_optax.transform.context import current, known_shardings, within

_Compiled = tuple[Wrapped, Compiled]


def compile_overlapping(build: Callable[..., _Compiled], device: Any) -> _Compiled:
    """Compiles a program so that its transfers overlap with products.

    XLA's scheduler then keeps more buffers alive. It is left out if the program takes
    more memory than the device has, and so are options that this XLA does not have.
    `build` takes them by name; `device` is None if nothing is transferred.
    """
    options = overlap_options(device)
    try:
        jitted, compiled = build(**options)
    except jax.errors.JaxRuntimeError as error:
        if not options or "No such compile option" not in str(error):
            raise
        warn_user(
            "this XLA takes no compiler options that overlap transfers and products,"
            f" and the step is compiled without: {str(error).splitlines()[0]}"
        )
        return build()
    unscheduled = {name: x for name, x in options.items() if name not in SCHEDULED}
    limit = 0 if unscheduled == options else device_memory(device)[0]
    if not limit or (needed := device_total(compiled)) <= limit:
        return jitted, compiled
    warn_user(
        f"transfers do not overlap with products, as the step would then take"
        f" {readable_bytes(needed)} of the device, and JAX has {readable_bytes(limit)}:"
        " give it fewer tokens, or more of the device's memory."
    )
    return build(**unscheduled)


_CONFIG: Any = jax.config


class _NotCompiled(BaseException):
    """JAX is about to compile a step that `Step.compile` has not checked."""


_is_checked = contextvars.ContextVar("paged_optax.jit_step", default=False)


@contextlib.contextmanager
def _checked(leaves: Sequence[PyTree]) -> Generator[None]:
    """Lets JAX trace and compile steps, without the warnings that are dealt with."""
    token = _is_checked.set(True)
    try:
        with warnings.catch_warnings(), _divided(leaves):
            # `check_donations` raises, and `compile_overlapping` passes these options.
            for text in ("Some donated buffers were not", NO_OVERLAP, PIPELINED):
                warnings.filterwarnings("ignore", text)
            yield
    finally:
        _is_checked.reset(token)


def _divided(leaves: Sequence[PyTree]) -> contextlib.AbstractContextManager[None]:
    """Has JAX trace by the arguments' shardings, if any is on several devices."""
    if shardings := sharding_list(leaves):
        return within(argument_shardings=shardings)
    return contextlib.nullcontext()


class Step:
    """A training step under `jax.jit`, whose caches alone keep its programs.

    In a trace of `jax.jit` or `jax.grad` it is a nested `jax.jit`, which donates
    nothing.

    Attributes:
      compiled: The program for the first arguments, for `memory_report`; None before
        the first call. `compile` returns the program for other arguments.
    """

    compiled: Compiled | None = None

    def __init__(self, step: Callable[..., PyTree], donated: Chosen, static: Chosen):
        self._step, self._donated, self._static = step, donated, static
        self._types: dict[str, jax.ShapeDtypeStruct] = {}
        self._travels = False
        self._forget()
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
        """Runs the step, and compiles it where `jax.jit` does.

        Donated arguments must not be used again. If the step fails, a note on the error
        names the arguments that are gone.
        """
        leaves = jax.tree.leaves((args, kwargs))
        traced = any(issubclass(kind, Tracer) for kind in set(map(type, leaves)))
        if traced or _CONFIG.jax_disable_jit:
            return self._nested(*args, **kwargs)
        try:
            committed = {getattr(x, "committed", False) for x in leaves}
            if False in committed and (True in committed or self._types):
                args, kwargs = commit_donated(args, kwargs, self._donated, self._types)
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
            with _checked(leaves):
                return self._jitted(*args, **kwargs)
        except BaseException as error:
            note_donated(error, self._donated.select(args, kwargs))
            raise

    def compile(self, *args: PyTree, **kwargs: PyTree) -> Compiled:
        """The program for arguments like these, compiled unless it already is."""
        args, kwargs = jax.tree.map(_typed, (args, kwargs))
        committed = commit_donated(args, kwargs, self._donated, self._types)
        return self._compile(*committed)

    def _jit_of(self, run: Callable[..., PyTree], **options: Any) -> Wrapped:
        run.__name__ = getattr(self._step, "__name__", "step")
        # JAX looks arguments up in it.
        run.__signature__ = inspect.signature(self._step, follow_wrapped=False)
        indices, names = self._static
        return jax.jit(run, static_argnums=indices, static_argnames=names, **options)

    def _forget(self) -> None:
        """Makes JAX forget the step's traces and programs."""

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if not _is_checked.get():
                raise _NotCompiled
            return self._traced(args, kwargs)

        indices, names = self._donated
        self._jit = functools.cache(
            lambda **options: self._jit_of(
                run,
                donate_argnums=indices,
                donate_argnames=names,
                keep_unused=KEEP_UNUSED,
                compiler_options=options or None,
            )
        )
        self._jitted: Any = self._jit()

    def _compile(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Compiled:
        leaves = [x for x in argument_leaves(args, kwargs) if x.key not in self._static]
        shardings = [x.value.sharding for x in leaves if is_placed(x.value)]
        check_not_moved(leaves, self._types)
        try:
            with _checked(jax.tree.leaves((args, kwargs))):
                jaxpr = self._jitted.trace(*args, **kwargs).jaxpr
                device: Any = local_device(shardings)
                warn_of_host_compute(jaxpr, device.platform)
                nothing_donated = not any(self._donated) and self.compiled is None
                if nothing_donated and any(on_host(x.value) for x in leaves):
                    warn_user(
                        "nothing is donated, so a step leaves the old parameters and"
                        " moments beside the new: name them in donate_argnums or"
                        " donate_argnames."
                    )
                # Without transfers nothing is to overlap, and CUDA graphs are faster.
                self._travels |= reaches_host(jaxpr)
                device = device if self._travels else None

                def build(**options: Any) -> _Compiled:
                    jitted = self._jit(**addressing_options(device), **options)
                    return jitted, jitted.lower(*args, **kwargs).compile()

                jitted, compiled = compile_overlapping(build, device)
            check_donations(compiled, leaves, self._donated)
        except Exception as error:
            # JAX must not run what it traced for arguments that are refused here.
            self._forget()
            if isinstance(error, ValueError):
                note_elsewhere(error)
            check_host_arithmetic(error, {x.name: x.value for x in leaves})
            raise
        self._jitted = jitted
        if self.compiled is None:
            self.compiled, self._types = compiled, placed_types(leaves)
        return compiled

    def _traced(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        """Traces the step, with its donated buffers kept and its results divided."""
        leaves = argument_leaves(args, kwargs)
        structure = jax.tree.structure((args, kwargs))
        shardings = current().argument_shardings or (None,) * len(leaves)
        arrays = [n for n, x in enumerate(leaves) if x.key not in self._static]
        values = [leaves[n].value for n in arrays]
        donated = [leaves[n].key in self._donated for n in arrays]

        def step(*values: PyTree) -> PyTree:
            new = dict(zip(arrays, values, strict=True))
            flat = [new.get(n, x.value) for n, x in enumerate(leaves)]
            # Tracers of automatic axes have no sharding: an update reads it from the
            # context.
            with within(argument_shardings=()), known_shardings(flat, shardings):
                args, kwargs = jax.tree.unflatten(structure, flat)
                return self._step(*args, **kwargs)

        step = jax.jit(step, inline=True)
        results = step(*keep_unread(step.trace(*values).jaxpr, values, donated))
        if not any(donated):
            return results
        given = [
            (value, [shardings[n] for n, x in enumerate(leaves) if x.key == key])
            for key, value in self._donated.select(args, kwargs).items()
        ]
        results = divide_like(results, given)
        # JAX pairs donated arguments with results of any memory.
        return donate_within_memory(results)


def _typed(x: PyTree) -> PyTree:
    """A shape with its memory in its type, as arrays have it; else the same value."""
    if not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is None:
        return x
    return x.update(sharding=typed_by_memory(x.sharding))


@overload
def jit_step(**options: Any) -> Callable[[Callable[..., PyTree]], Step]: ...


@overload
def jit_step(
    step: Callable[..., PyTree], /, *example_args: PyTree, **options: Any
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
    `jax.grad` or `jax.vmap` it is `jax.jit` of the step. A step returns the values that
    it changes, NNX modules too, which only `nnx.jit` writes back.

    `jax.jit` pairs donated buffers with outputs by shape and order alone if no
    placement is stated (jax 0.10.2 to 0.12.0.1), so that parameters can be placed in
    the moments' memory. Here buffers are paired within a memory, and each donated one
    is looked up in the compiled program.

    On accelerators a step that computes on host arrays is warned of, as Optax's own
    wrappers that skip steps do around `paged(...)`; the warning names the way out.

    Args:
      step: A function of pytrees of arrays. Without it a decorator is returned.
      *example_args: Arguments, or `ShapeDtypeStruct`s that state their shardings.
        Without them the step is compiled when it is first called.
      donate_argnums: Positions of the arguments whose buffers the step may reuse.
      donate_argnames: Their names.
      static_argnums: Positions of hashable arguments, constants of the program.
      **example_kwargs: Arguments by name.

    Returns:
      The compiled `Step`, or a decorator. Its `compiled` is the program of the first
      arguments, and `compile(*args)` returns the program of others.

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
      >>> params, state = step(params, state, {"w": jnp.full((512, 512), 0.5)})

      As a decorator, compiled at the first call:

      >>> @po.jit_step(donate_argnames=("params", "state"))
      ... def step(params, state, *, scale):
      ...     gradients = jax.tree.map(lambda p: scale * p, params)
      ...     updates, state = tx.update(gradients, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = step(params, state, scale=0.5)
    """
    examples = bool(example_args or example_kwargs)

    def jitted(step: Callable[..., PyTree]) -> Step:
        donated = Chosen.create(step, donate_argnums, donate_argnames)
        return Step(step, donated, Chosen.create(step, static_argnums))

    if step is None and not examples:
        return jitted
    if not callable(step):
        raise TypeError(
            f"step={step!r:.80} is no function: the step is a function, and comes"
            " first, as in jit_step(step, params, state, donate_argnums=(0, 1))."
            " Other names are arguments of the step:"
            f" {', '.join(example_kwargs) or 'none'}."
        )
    compiled = jitted(step)
    if examples:
        compiled.compile(*example_args, **example_kwargs)
    return compiled
