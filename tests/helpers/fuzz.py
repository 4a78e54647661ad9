"""Random transformations, paged and unpaged, where XLA:CPU rounds one way only.

A recipe is a dictionary of numbers and names, which `recipes` draws.
`python tests/helpers/fuzz.py` answers with the distances of the recipes it is asked
for, see `apart`; the flags are those of `exact`.
"""

import contextlib
import functools
import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

import paged_optax as po
from helpers import apart, broken, exact, quick_compiler, reference
from helpers import fuzz_masters as masters
from helpers import fuzz_parts as parts
from helpers.fuzz_leaves import Leaf, coder, each, leaves_of, on_one_device, unnamed
from paged_optax.engine import transfers

#: Nearly all of a case is XLA:CPU's compiler. Without YNNPACK, whose
#: `ynn::define_static_transpose` now and then reads what is not there when a sum first
#: runs, and ends the process (jaxlib 0.10.2: four of four that ran one such recipe for
#: two minutes; none without).
FLAGS = (
    f"{exact.FLAGS} {quick_compiler.FLAGS} --xla_force_host_platform_device_count=8"
    " --xla_cpu_experimental_ynn_fusion_type="
)

Recipe = dict[str, Any]


def transformation(recipe: Recipe) -> optax.GradientTransformation:
    """What a recipe pages."""
    mask = parts.MASKS.get(recipe["mask"], lambda inner: inner)
    return optax.chain(
        *(parts.BLOCKS[name]() for name in recipe["before"]),
        mask(parts.by_steps(recipe["steps"])),
        *(parts.BLOCKS[name]() for name in recipe["after"]),
    )


class Case:
    """A recipe's transformation, alone and paged.

    Both start each step from the same state, which Optax is given decoded. What it
    makes of it is stored as the paged state is; what belongs to a parameter that is not
    active stays.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, inner = recipe, transformation(recipe)
        names = ("page_size", "min_paged_size", "device_budget", "codec")
        settings = {name: recipe[name] for name in names}
        settings |= [recipe["masters"]] if recipe["masters"] else []
        paged = po.paged(inner, **settings)
        following = [parts.FOLLOWING[name]() for name in recipe["following"]]
        self.following, alone = optax.chain(optax.identity(), *following), inner
        if following and not recipe["masters"]:
            inner, paged = (optax.chain(tx, *following) for tx in (inner, paged))
        if recipe["wrapper"]:
            whose, name = recipe["wrapper"]
            wrap = parts.WRAPPERS[name]
            alone = inner = wrap(optax, inner)
            paged = wrap(_MODULES[whose], paged)
        self.paged, self.mesh = paged, _mesh(recipe["mesh"])
        self.params = self.arrays(9, recipe["dtypes"])
        if recipe["wrapper"] and name.startswith("lookahead"):
            self.params = optax.LookaheadParams.init_synced(self.params)
        seen = masters.wide(self.params) if recipe["masters"] else self.params
        self.leaves = leaves_of(recipe["codec"], alone.init, seen)
        if not recipe["masters"]:  # what follows is stored as it is
            self.leaves += leaves_of(None, self.following.init, seen)
        # As little as this is sooner done than compiled.
        self.first = inner.init(seen)
        self.expected, self.found = jax.jit(inner.update), self._update
        if recipe["shard_map"]:
            self.found = self._update_parts
        elif not recipe["eager"]:
            options = self.options()
            self.expected = jax.jit(inner.update, compiler_options=options)
            self.found = jax.jit(
                self._update, static_argnames="closed", compiler_options=options
            )

    def arrays(self, seed: int, dtypes: Sequence[str]) -> Any:
        """A tree of the recipe's shapes, normally distributed."""
        random, shapes = np.random.default_rng(seed), self.recipe["shapes"]
        normal = [
            jnp.asarray(random.normal(size=shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        return parts.TREES[self.recipe["tree"]](normal)

    def gradients(self, number: int) -> Any:
        """The gradients of a step."""
        made = self.arrays(number, self.recipe["gradients"])
        infinite = number in self.recipe["infinite"]
        return jax.tree.map(lambda x: x / 0, made) if infinite else made

    def value(self, number: int) -> dict[str, Array]:
        """The extra arguments of a step."""
        blocks = self.recipe["before"] + self.recipe["after"]
        reads = set(blocks) & set(parts.WITH_VALUE)
        return {"value": jnp.float32(1.5 - number)} if reads else {}

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """The mesh, where its axes are explicit."""
        explicit = self.over("Explicit")
        return jax.set_mesh(self.mesh) if explicit else contextlib.nullcontext()

    def over(self, kind: str) -> bool:
        """Whether there is a mesh of such axes."""
        return self.mesh is not None and self.recipe["mesh"]["kind"] == kind

    def options(self) -> dict[str, Any]:
        """How XLA compiles both, where it would round what follows in two ways.

        It leaves out the rounding of a bfloat16 term of a float32 moment
        (`xla_allow_excess_precision`). Over explicit axes it does not, as JAX
        constrains the sharding of each result: plain Optax differs there from itself.
        What is paged never sees those axes, and what follows does.
        """
        outside = self.recipe["following"] and not self.recipe["masters"]
        apart = self.over("Explicit") and outside
        return {"xla_allow_excess_precision": False} if apart else {}

    def divide(self, tree: Any) -> Any:
        """Divides a tree along those axes that the mesh's divide evenly."""
        if self.mesh is None:
            return tree

        def place(x: Array) -> Array:
            axes = zip(self.mesh.shape.items(), x.shape, strict=False)
            even = [name if x.size and not n % by else None for (name, by), n in axes]
            return jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*even)))

        return jax.tree.map(place, tree)

    def init(self) -> tuple[Any, dict[str, float]]:
        """The paged state, and how far it is from Optax's."""
        state = self.made()
        wanted = each(Leaf.encode, self.leaves, self.first)
        return state, _apart("init", wanted, state)

    def made(self) -> Any:
        """The paged state."""
        # Under `jit` over automatic axes nothing says how arrays are divided.
        traced = self.recipe["traced_init"] and not self.over("Auto")
        init = jax.jit(self.paged.init) if traced else self.paged.init
        with self.around():
            return init(self.divide(self.params))

    def step(self, number: int, state: Any) -> tuple[Any, dict[str, float]]:
        """The next paged state, and how far a step's results are from Optax's."""
        gradients, value = self.gradients(number), self.value(number)
        old = each(Leaf.decode, self.leaves, state)
        updates, new = self.expected(gradients, old, self.params, **value)
        kept = each(Leaf.encode, self.leaves, new)
        gates = self.recipe["active"][number]
        if gates is not None:
            one_each = jax.tree.structure(gradients).unflatten(gates)
            updates = jax.tree.map(
                lambda x, on: x if on else jnp.zeros_like(x), updates, one_each
            )
            either = lambda leaf, x, y: x if leaf.is_active(gates) else y
            kept = each(either, self.leaves, kept, state)
        closed = None if gates is None or self.recipe["traced"] else tuple(gates)
        traced = None if gates is None or closed else list(map(jnp.asarray, gates))
        given = self.divide(gradients), state, self.divide(self.params)
        with self.around():
            moved, state = self.found(*given, value, traced, closed=closed)
        found = _apart(f"updates {number}", updates, moved)
        return state, found | _apart(f"state {number}", kept, state)

    def _update(self, gradients, state, params, value, traced, closed):
        if gates := traced or closed:
            value = value | {"active": jax.tree.structure(gradients).unflatten(gates)}
        return self.paged.update(gradients, state, params, **value)

    def _update_parts(self, gradients, state, params, *_, **__):
        """By each device's own part, within a `jax.shard_map`."""
        given, whole = (gradients, state, params), PartitionSpec()
        into = jax.tree.map(lambda x: getattr(x.sharding, "spec", whole), given)
        out = into[2], into[1]
        update = jax.shard_map(
            self.paged.update, mesh=self.mesh, in_specs=into, out_specs=out
        )
        return (update if self.recipe["eager"] else jax.jit(update))(*given)


class OnMasters(Case):
    """A recipe's transformation on master weights, beside plain Optax on them.

    What follows the transformation changes the parameters, as anything else may.
    """

    def init(self) -> tuple[Any, dict[str, float]]:
        state = self.made()
        found = masters.apart_at_first(self.params, state)
        wanted = each(Leaf.encode, self.leaves, self.first)
        self.kept = self.following.init(self.params)
        return state, found | _apart("init", wanted, state.inner_state)

    def step(self, number: int, state: Any) -> tuple[Any, dict[str, float]]:
        gradients, params = self.gradients(number), self.params
        old = each(Leaf.decode, self.leaves, state.inner_state)
        before = masters.of(params, state)
        value = self.value(number)
        updates, new = self.expected(masters.wide(gradients), old, before, **value)
        wanted = each(Leaf.encode, self.leaves, new)
        given = self.divide(gradients), state, self.divide(params)
        with self.around():
            moved, state = self.found(*given, value, None, closed=None)
        moved = jax.tree.map(on_one_device, moved)
        found = masters.apart(params, before, updates, moved, state)
        found |= _apart("state", wanted, state.inner_state)
        after, self.kept = self.following.update(moved, self.kept, params)
        self.params = optax.apply_updates(params, after)
        return state, {f"{path} {number}": x for path, x in found.items()}


_MODULES = {"optax": optax, "po": po}


def _mesh(recipe: Recipe | None) -> jax.sharding.Mesh | None:
    if recipe is None:
        return None
    sizes, kind = recipe["sizes"], jax.sharding.AxisType[recipe["kind"]]
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], (kind,) * len(sizes))


def run(recipe: Recipe) -> dict[str, float]:
    """The distances of a recipe's transformation from its paged self."""
    _compute_for(recipe["platform"])
    case = OnMasters(recipe) if recipe["masters"] else Case(recipe)
    state, found = case.init()
    for number in range(len(recipe["active"])):
        state, apart_by = case.step(number, state)
        found |= apart_by
    return found


def _apart(name: str, wanted: Any, found: Any) -> dict[str, float]:
    distances = reference.distances(unnamed(wanted), unnamed(found))
    return {f"{name} {path}": distance for path, distance in distances.items()}


#: XLA:CPU of jax 0.12 gives these of float16 other last bits in a loop than outside.
_OF_HALVES = {"log1p": jax.lax.log1p, "rsqrt": jax.lax.rsqrt}


def _rounded_once(function: Callable[[Array], Array], x: Array) -> Array:
    half = jnp.result_type(x) == jnp.float16
    return function(x.astype(jnp.float32)).astype(x.dtype) if half else function(x)


_computed_for = [""]


def _compute_for(platform: str) -> None:
    """Computes here what that platform would; nothing jitted is kept from another.

    No branch is traced but its own, which is all that XLA gets to see.
    """

    def chosen(*arguments: Any, default: Any = None, **branches: Any) -> Any:
        return branches.get(platform, default)(*arguments)

    if _computed_for != [platform]:
        _computed_for[:] = [platform]
        jax.lax.platform_dependent = chosen
        # XLA:CPU knows no layout but its own.
        transfers.with_layout_constraint = lambda page, layout: page
        for name, function in _OF_HALVES.items():
            setattr(jax.lax, name, functools.partial(_rounded_once, function))
        forget()


def forget() -> None:
    """Forgets what is compiled, which stays in memory."""
    jax.clear_caches()
    coder.cache_clear()
    gc.collect()


if __name__ == "__main__":
    broken.break_by_name()
    jax.config.update("jax_traceback_in_locations_limit", 0)
    apart.answer(lambda recipe: run(json.loads(recipe)), forget)
