"""How often XLA compiles a run's first steps: as often as with plain Optax, or less.

A step's results are committed, of one kind of sharding and of one type. Arguments of
any other kind have `jax.jit` compile for them, and again for the step's own results.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import paged_optax as po
from helpers.reference import ALIASES, SMALL_PAGES, arrays
from paged_optax.backend.memory import on_host

SHAPES = {"w": (64, 64), "b": (64,)}
IN_CODES = ["paged_adamw_8bit", "paged_lion_8bit", "paged_ademamix_8bit"]


def alone(fast):
    """A lookahead as a transformation of the fast parameters alone."""
    pair = lambda p: optax.LookaheadParams(p, p)

    def update(updates, state, params):
        updates, state = fast.update(updates, state, pair(params))
        return updates.fast, state

    return optax.GradientTransformation(lambda p: fast.init(pair(p)), update)


def every_other(count):
    return count % 2 == 0


def adamw(of=po.paged_adamw, **options):
    return of(1e-2, **options, **(SMALL_PAGES if of is not optax.adamw else {}))


#: Each of a package, this one or Optax, and of its AdamW.
PAIRS = {
    "adamw": lambda _, adamw: adamw(),
    "chain": lambda _, adamw: optax.chain(optax.clip_by_global_norm(1.0), adamw()),
    "partition": lambda _, adamw: optax.partition(
        {"a": adamw(), "b": adamw()}, {"w": "a", "b": "b"}
    ),
    "MultiSteps": lambda of, adamw: of.MultiSteps(adamw(), 2),
    "MultiSteps of Optax's": lambda of, _: of.MultiSteps(optax.adamw(1e-2), 2),
    "apply_if_finite": lambda of, adamw: of.apply_if_finite(adamw(), 3),
    "conditionally_transform": lambda of, adamw: of.conditionally_transform(
        adamw(), every_other
    ),
    "conditionally_mask": lambda of, adamw: of.conditionally_mask(adamw(), every_other),
    "lookahead": lambda of, adamw: alone(of.lookahead(adamw(), 2, 0.5)),
    "lookahead again": lambda of, adamw: alone(
        of.lookahead(adamw(), 2, 0.5, reset_state=True)
    ),
    "two wrappers": lambda of, adamw: of.apply_if_finite(
        of.conditionally_mask(adamw(), every_other), 3
    ),
}
#: What has no counterpart in Optax is compared with AdamW.
OWN = {
    "eight bits": {"codec": "dynamic_int8"},
    "stochastic": {"codec": "bfloat16_stochastic"},
    "masters": {"master_dtype": "float32"},
    "steps of its own": {"per_parameter_steps": True},
    "resident": {"device_budget": None},
}


def mesh(count, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:count]), ("d",), axis_types=(kind,))


PLACES = {
    "one device": lambda tree: jax.device_put(tree, jax.devices()[0]),
    "another device": lambda tree: jax.device_put(tree, jax.devices()[1]),
    "mesh of one": lambda tree: over(tree, mesh(1), "d"),
    "mesh": lambda tree: over(tree, mesh(2), "d"),
    "explicit mesh": lambda tree: over(tree, mesh(2, AxisType.Explicit), "d"),
    "replicated": lambda tree: over(tree, mesh(2)),
}


def over(tree, mesh, *axes):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*axes)))


def counted(compilations, tx, params, state, state_first=False):
    """The compilations of each of three donated steps, and where they lead."""

    def step(params, state):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    swapped = lambda state, params: step(params, state)[::-1]
    jitted = jax.jit(swapped if state_first else step, donate_argnums=(0, 1))
    counts, (params, state) = [], (copied(params), copied(state))
    for _ in range(3):
        before = len(compilations)
        if state_first:
            state, params = jitted(state, params)
        else:
            params, state = jitted(params, state)
        jax.block_until_ready((params, state))
        counts.append(len(compilations) - before)
    return counts, params, state


def committed(tree):
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)


def copied(tree):
    return jax.tree.map(lambda x: jnp.copy(x) if x.committed else x + 0, tree)


def by_orbax(directory, saved, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(directory, target)


def described(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def plain(name):
    return PAIRS.get(name, PAIRS["adamw"])(optax, lambda: optax.adamw(1e-2))


def paged(name):
    if name in OWN:
        return adamw(**OWN[name])
    return PAIRS[name](po, adamw)


CASES = [("one device", name) for name in [*PAIRS, *OWN]]
SOME = ("adamw", "eight bits", "two wrappers")
CASES += [(place, name) for place in list(PLACES)[1:] for name in SOME]


@pytest.mark.quick("adamw", "MultiSteps", "-one device-two wrappers", "eight bits")
@pytest.mark.parametrize(("place", "name"), CASES)
def test_a_run_compiles_its_step_once(compilations, tmp_path, place, name):
    """New, restored by Orbax, or by pickle: as often as Optax's state restored."""
    params = PLACES[place](arrays(shapes=SHAPES))
    tx, own = paged(name), plain(name)
    _, *ended = counted(compilations, own, params, own.init(params))
    restored = by_orbax(tmp_path / "own", ended, described(ended))
    wanted = counted(compilations, own, *restored)[0]
    assert wanted == [1, 0, 0]

    found, *ended = counted(compilations, tx, params, tx.init(params))
    assert found == wanted
    target = [described(ended[0]), po.abstract_state(tx, params)]
    restored = by_orbax(tmp_path / "paged", ended, target)
    assert counted(compilations, tx, *restored)[0] == wanted
    pickled = pickle.loads(pickle.dumps(jax.device_get(ended[1])))
    placed = po.place_state(tx, pickled, params)
    assert counted(compilations, tx, params, placed)[0] == wanted
    assert counted(compilations, tx, params, placed, state_first=True)[0] == wanted


def test_a_scalar_of_optax_beside_a_paged_state(compilations):
    """`place_state` commits what Optax's own transformations leave free."""
    params = PLACES["one device"](arrays(shapes=SHAPES))
    tx = optax.chain(adamw(), optax.scale_by_schedule(lambda count: 1 / (count + 1)))
    state = po.place_state(tx, tx.init(params), params)
    assert counted(compilations, tx, params, state)[0] == [1, 0, 0]


def test_a_restored_nnx_optimizer(compilations, tmp_path):
    """Restored into a new model and optimizer, and put back, as documented."""

    def counted(model, optimizer):
        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer):
            loss = lambda model: jnp.mean(model(jnp.ones((8, 64))) ** 2)
            optimizer.update(model, nnx.grad(loss)(model))

        counts = []
        for _ in range(3):
            before = len(compilations)
            step(model, optimizer)
            jax.block_until_ready(nnx.state(optimizer))
            counts.append(len(compilations) - before)
        return counts

    def begun():
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)
        return committed((model, optimizer))

    first, second = begun(), begun()
    assert counted(*first) == [1, 0, 0]
    saved = nnx.to_pure_dict(nnx.state(first))
    model, optimizer = second
    into = nnx.to_pure_dict(nnx.state(second))
    nnx.update(second, by_orbax(tmp_path / "run", saved, into))
    state = po.place_state(adamw(), optimizer.opt_state, nnx.state(model, nnx.Param))
    optimizer.opt_state = nnx.data(state)
    assert counted(model, optimizer) == [1, 0, 0]


@pytest.mark.parametrize("wrap", ["adamw", "MultiSteps", "two wrappers", "lookahead"])
def test_a_free_state_stays_free(wrap):
    """Without host arrays a state follows its parameters, as Optax's own."""
    free = lambda: po.paged_adamw(1e-2, device_budget=None)
    state = PAIRS[wrap](po, free).init(arrays(shapes=SHAPES))
    assert not any(x.committed for x in jax.tree.leaves(state))


def test_a_coded_state_is_beside_its_parameters():
    """On whichever device they are, though its arrays have other shapes."""
    params = PLACES["another device"](arrays(shapes=SHAPES))
    for codec in (None, "dynamic_int8", "dynamic_int4", "float8_e4m3", "bfloat16"):
        state = adamw(codec=codec).init(params)
        leaves = jax.tree.leaves(state)
        assert {x.device for x in leaves} == {jax.devices()[1]}
        assert any(map(on_host, leaves))


@pytest.mark.quick("-paged_adamw-", "paged_adamw_8bit")
@pytest.mark.parametrize(("number", "alias"), list(enumerate([*ALIASES, *IN_CODES])))
def test_update_compiles_once(number, alias):
    _, options = ALIASES.get(alias, (None, {}))
    tx = getattr(po, alias)(1e-2, **options, **SMALL_PAGES)
    params = arrays(shapes=SHAPES)
    state = tx.init(params)
    assert any(map(on_host, jax.tree.leaves(state)))
    step = jax.jit(tx.update, donate_argnums=(0, 1) if number % 2 else ())
    for step_number in range(3):
        _, state = step(arrays(seed=step_number, shapes=SHAPES), state, params)
    assert step._cache_size() == 1


def test_a_state_without_moments_is_committed():
    """As its parameters are: a plain step then compiles once, with noise as without."""
    params = committed({"w": jnp.ones((8, 16))})
    tx = po.paged(optax.noisy_sgd(1e-3, key=0), min_paged_size=0)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
