"""`jit_step`: a step compiled with every donation pinned and checked."""

import functools
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from paged_optax.backend.compiler_options import NO_OVERLAP
from paged_optax.backend.user_warnings import warn_user
from paged_optax.compiling.arguments import (
    ArgumentKey,
    ArrayKey,
    Call,
    CallKind,
    Keys,
    differences,
    hosted,
    label,
    names_by_position,
    place_of,
    refuse_moved,
    several,
    signature,
    typed,
)
from paged_optax.compiling.donations import (
    are_elsewhere,
    check_donations,
    device_of,
    donates_unused,
    note_donated,
    placements,
    with_donated,
)
from paged_optax.compiling.host_arithmetic import refuse_computed_on_host
from paged_optax.compiling.memory_report import compile_overlapping
from paged_optax.transform.checks import note_elsewhere
from paged_optax.transform.context import known_shardings


class _CompiledStep(NamedTuple):
    """A step compiled for arguments of one kind.

    Attributes:
      compiled: The program.
      jitted: Its function, which JAX does not compile again.
      kind: The kind of calls that it serves.
      donated: Positions of the donated arguments.
    """

    compiled: jax.stages.Compiled
    jitted: Callable[..., PyTree]
    kind: CallKind
    donated: tuple[int, ...]

    def run(self, values: tuple[PyTree, ...]) -> PyTree:
        """Runs it."""
        try:
            return self.compiled(*values)
        except ValueError:
            packed = any(map(_is_packed, jax.tree.leaves(values)))
            if not packed or are_elsewhere(values, self.compiled):
                raise
            # jax 0.10.2 mistakes the layouts of such arrays for other ones, but not
            # where the function is called.
            return self.jitted(*values)


class Step:
    """A training step, compiled once for each kind of arguments."""

    def __init__(self, step: Callable[..., PyTree], donated: Keys, static: Keys):
        self._step = step
        self._signature = signature(step)
        self._donated = donated
        self._static = frozenset(name for key in static for name in self._names(key))
        self._programs: list[_CompiledStep] = []  # the first one last
        self._hosted: set[ArrayKey] = set()
        self._compiling = threading.Lock()
        functools.update_wrapper(self, step, updated=())

    @property
    def compiled(self) -> jax.stages.Compiled | None:
        """The program for the first arguments, for `memory_report`.

        None before the first call. `compile` gives the program for other arguments.
        """
        return self._programs[-1].compiled if self._programs else None

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> "Step | types.MethodType":
        """Binds a step that is a method to its object."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the step; donated arguments must not be used again.

        As `jax.jit`, it compiles if it has no program for such arguments: of these
        shapes, dtypes, structures, places and constants. It keeps the others.

        If it fails, a note on the error says which donated arguments are gone.
        """
        call = self._call(args, kwargs)
        kind = call.kind
        program = next((x for x in self._programs if x.kind == kind), None)
        program = program or self._program(call)
        try:
            try:
                return program.run(call.values)
            except ValueError:
                # JAX compares placements before it runs a program, so that nothing was
                # donated yet.
                if not are_elsewhere(call.values, program.compiled):
                    raise
            program = self._program(call)
            return program.run(call.values)
        except BaseException as error:
            note_donated(error, call.values, call.keys, program.donated)
            raise

    def compile(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Compiled:
        """The program for arguments like these, compiled unless it already is."""
        return self._program(self._call(args, kwargs)).compiled

    def _call(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Call:
        """Arguments by position, and those without a position by name.

        Raises:
          TypeError: If they are not what the step takes, or a static one has no hash.
        """
        if self._signature is not None:
            bound = self._signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        by_key = dict(enumerate(args)) | dict(sorted(kwargs.items()))
        static = {key: by_key.pop(key) for key in list(by_key) if key in self._static}
        for key, value in static.items():
            if not isinstance(value, Hashable):
                raise TypeError(
                    f"static {label(key)} is of type {type(value).__name__}, which has"
                    " no hash: a static argument is a constant of the program."
                )
        return Call(tuple(by_key), tuple(by_key.values()), static)

    def _program(self, call: Call) -> _CompiledStep:
        """The program for such arguments, where they are; compiled if there is none."""
        call = call._replace(values=jax.tree.map(typed, call.values))
        kind = call.kind
        # Threads that call a step at once compile it once: the others wait and find it.
        with self._compiling:
            for program in self._programs:
                if program.kind == kind and not are_elsewhere(
                    call.values, program.compiled
                ):
                    return program
            try:
                program = self._compiled_for(call)
            except Exception as error:
                if isinstance(error, ValueError):
                    note_elsewhere(error)
                if self._programs:
                    others = differences(call, self._programs[-1].kind)
                    others = others or ["in other places, or with other constants"]
                    error.add_note(
                        "The step was compiled before, for other arguments:"
                        f" {', '.join(others[:3])}."
                    )
                flat = jax.tree_util.tree_flatten_with_path(call.values)[0]
                named = {place_of(call.keys, path): x for path, x in flat}
                refuse_computed_on_host(error, named)
                raise
            self._programs.insert(0, program)
        return program

    def _compiled_for(self, call: Call) -> _CompiledStep:
        donated, belonging = self._positions(call.keys), self._hosted | hosted(call)
        refuse_moved(call, belonging)
        if belonging and not donated and not self._programs:
            warn_user(
                "nothing is donated, so a step leaves the old parameters and moments"
                " beside the new: name them in donate_argnums or donate_argnames."
            )

        # A new function for each attempt, because JAX keeps what it traced by function.
        def run(*values: PyTree) -> PyTree:
            # Constants go back among the arrays, by position or by name.
            by_key = call.static | dict(zip(call.keys, values, strict=True))
            positions = sorted(key for key in by_key if isinstance(key, int))
            named = {key: x for key, x in by_key.items() if isinstance(key, str)}
            # Arrays have a sharding; tracers of automatic axes have none, so that the
            # step's update reads the placements from the context.
            places = [
                getattr(x, "sharding", None) for x in jax.tree.leaves(call.values)
            ]
            with known_shardings(jax.tree.leaves(values), places):
                return self._step(*(by_key[key] for key in positions), **named)

        with warnings.catch_warnings():
            # JAX only warns of what is an error here, and names no leaf.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            # `compile_overlapping` tells XLA, which this warning says nobody does.
            warnings.filterwarnings("ignore", NO_OVERLAP)
            run = with_donated(run, call.values, donated)
            placed = placements(run, call.values, donated)
            # Without transfers nothing is to overlap, and CUDA graphs are faster.
            places = placed.inputs, placed.outputs
            device = device_of(places) if placed.travels else None

            def program(
                keep_unused: bool,
            ) -> tuple[jax.stages.Wrapped, jax.stages.Compiled]:
                jit = lambda options: jax.jit(
                    run,
                    donate_argnums=donated,
                    in_shardings=placed.inputs,
                    out_shardings=placed.outputs,
                    keep_unused=keep_unused,
                    compiler_options=options or None,
                )
                return compile_overlapping(jit, call.values, device)

            jitted, compiled = program(keep_unused=False)
            if donates_unused(compiled, call.values, donated):
                jitted, compiled = program(keep_unused=True)
        check_donations(compiled, call.values, call.keys, donated)
        self._hosted = belonging
        return _CompiledStep(compiled, jitted, call.kind, donated)

    def _positions(self, keys: Keys) -> tuple[int, ...]:
        """The positions of the donated arguments."""
        positions = set()
        for key in self._donated:
            names = self._names(key)
            positions |= {i for i, one in enumerate(keys) if one in names}
            if names.isdisjoint(keys):
                which = "donate_argnums" if isinstance(key, int) else "donate_argnames"
                raise ValueError(
                    f"{which} names argument {key!r}, which the step is not given as an"
                    f" array: it has {self._named(keys)}."
                )
        return tuple(sorted(positions))

    def _named(self, keys: Keys) -> str:
        """How many arguments there are, and what each is called, for messages."""
        names = enumerate(names_by_position(self._signature))
        named: dict[ArgumentKey, str] = {
            i: f"{i} is {name!r}" for i, name in names if name
        }
        each = [named.get(key, str(key)) for key in keys]
        count = f"{len(keys)} argument{'' if len(keys) == 1 else 's'}"
        return f"{count}: {', '.join(each)}" if each else count

    def _names(self, key: ArgumentKey) -> set[ArgumentKey]:
        """An argument's position and its name: it may be given by either."""
        names = names_by_position(self._signature)
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

    Like `jax.jit`, the step compiles again for arguments of other shapes, dtypes,
    structures or places, and for other constants; it keeps the earlier programs. It
    does not compile again if JAX's configuration changes, as within
    `jax.default_matmul_precision(...)`. A step returns what it changes, NNX modules
    too: `nnx.jit` writes them back by itself, this does not.

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


def _is_packed(x: object) -> bool:
    """Whether an array's values are smaller than a byte, such as NF4's codes."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return jax.dtypes.itemsize_bits(dtype) < 8
