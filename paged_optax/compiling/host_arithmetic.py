"""Computation on host arrays in a traced step, found and warned of.

Optax's own `MultiSteps`, `apply_if_finite`, `conditionally_*` and
`lookahead(reset_state=True)` select between an old state and a new one, or multiply
it. Between host arrays XLA:GPU copies the whole state for that, silently, and XLA:TPU
fails to compile with an unrelated message.
"""

import itertools
import pathlib
from collections.abc import Iterator, Mapping

import jax
from jax.extend import core

from paged_optax.backend.memory import HOST, on_host
from paged_optax.backend.platforms import GPU_COPIES_FOR_CONDITIONALS
from paged_optax.backend.types import ArrayOrShape
from paged_optax.backend.user_warnings import warn_user

# Primitives that keep a host array's values, or move it; and those that only hold
# jaxprs, which are searched.
_HARMLESS = frozenset(
    """copy copy_p device_put dynamic_slice dynamic_update_slice empty expand_dims
    layout_constraint mesh_cast optimization_barrier pair_donated pvary reshape reshard
    sharding_constraint slice squeeze
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vmap_call
    jit pjit remat2 run_state scan shard_map while xla_metadata_call""".split()
)

# By the file of Optax that an equation was traced from.
_CURES = {
    "_accumulation.py": "use paged_optax.MultiSteps",
    "_conditionality.py": "use paged_optax.apply_if_finite, conditionally_transform or"
    " conditionally_mask",
    "lookahead.py": "use paged_optax.lookahead",
}

_JAX = pathlib.Path(jax.__file__).parent

_Jaxpr = core.Jaxpr | core.ClosedJaxpr
_Equations = tuple[core.JaxprEqn, ...]


def _equations(
    jaxpr: _Jaxpr, around: _Equations, visited: set[int]
) -> Iterator[tuple[core.JaxprEqn, _Equations, bool]]:
    """Yields equations, the ones around each, and if it branches by platform.

    Compilation for a platform leaves one branch of `platform_dependent`.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    # Each function once, however often it is called.
    if id(jaxpr) in visited:
        return
    visited.add(id(jaxpr))
    platform_index: set[core.Var] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        by_platform = not platform_index.isdisjoint(_variables(eqn))
        if name == "platform_index" or (name == "clamp" and by_platform):
            platform_index.update(eqn.outvars)
        yield eqn, around, by_platform
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _equations(inner, (eqn, *around), visited)


def _variables(eqn: core.JaxprEqn) -> list[core.Var]:
    return [x for x in eqn.invars if not isinstance(x, core.Literal)]


def _on_host(variable: core.Var) -> bool:
    aval = variable.aval
    return getattr(aval, "memory_space", None) == HOST and getattr(aval, "size", 0) > 0


def reaches_host(jaxpr: core.ClosedJaxpr) -> bool:
    """True if any argument or intermediate value of a jaxpr is in host memory."""
    results = (x for y, *_ in _equations(jaxpr, (), set()) for x in y.outvars)
    return any(map(_on_host, itertools.chain(jaxpr.jaxpr.invars, results)))


def warn_of_host_compute(jaxpr: _Jaxpr, platform: str) -> None:
    """Warns, naming the way out, if a step computes on host arrays.

    On the CPU all memory is the host's, and nothing is lost.
    """
    if platform == "cpu":
        return
    copies = platform != "tpu" and GPU_COPIES_FOR_CONDITIONALS
    for eqn, around, by_platform in _equations(jaxpr, (), set()):
        name = eqn.primitive.name
        variables = [*eqn.outvars, *_variables(eqn)]
        # The branches of a conditional are searched, which get its operands. XLA:GPU
        # of some versions copies the host arrays that it returns.
        if name == "cond":
            variables = eqn.outvars if copies and not by_platform else []
        touched = list(filter(_on_host, variables))
        if touched and name not in _HARMLESS:
            # Equations that JAX cached from an earlier trace have no frames.
            frames = next(filter(None, map(_frames, (eqn, *around))), [])
            where = " ({}:{})".format(*frames[0]) if frames else ""
            warn_user(
                f"the step computes `{name}` on {touched[0].aval.str_short()}, which is"
                f" in host memory{where}: XLA copies the whole state for it, or does"
                f" not compile. Instead, {_cure(frames)}."
            )
            return


def _frames(eqn: core.JaxprEqn) -> list[tuple[str, int]]:
    """The files and lines an equation was traced from, without JAX's own."""
    traceback = eqn.source_info.traceback
    return [
        (frame.file_name, frame.line_num)
        for frame in (traceback.frames if traceback else ())
        if _JAX not in pathlib.Path(frame.file_name).parents
    ]


def _cure(frames: list[tuple[str, int]]) -> str:
    for path in (pathlib.Path(file) for file, _ in frames):
        if "optax" in path.parts and path.name in _CURES:
            return f"{_CURES[path.name]}, which gives the same numbers"
    return "move it with jax.device_put(x, jax.memory.Space.Device) first"


def check_host_arithmetic(error: Exception, args: Mapping[str, ArrayOrShape]) -> None:
    """Names the arguments in host memory, where JAX refuses to compute on such."""
    host = {name: str(jax.typeof(x)) for name, x in args.items() if on_host(x)}
    if host and "memory_space of all inputs" in str(error):
        found = [name for name, type_ in host.items() if type_ in str(error)]
        raise ValueError(
            "the step computes on an array in host memory, or on the gradient of one,"
            f" which is there too: {' or '.join((found or [*host])[:3])}. Move it to"
            " the device first, by jax.device_put(x, jax.memory.Space.Device)."
        ) from error
