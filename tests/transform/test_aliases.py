"""Every name of the design, with Optax's own parameters first."""

import functools
import inspect
import re

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import paged_optax as po

#: The design's list, and what each pages.
NAMES = {
    f"paged_{name}{bits}": getattr(optax, name, None) or getattr(optax.contrib, name)
    for bits, names in {
        "": "adamw adam nadamw lion ademamix sgd rmsprop adagrad lamb lars"
        " adafactor muon",
        "_32bit": "adamw lion ademamix",
        "_8bit": "adamw lion ademamix",
    }.items()
    for name in names.split()
}

PAGING = [
    parameter
    for parameter in inspect.signature(po.paged).parameters.values()
    if parameter.name != "inner"
]


def test_paging_parameters_are_keywords_with_defaults():
    assert {x.kind for x in PAGING} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(x.default is not inspect.Parameter.empty for x in PAGING)
    assert [x.name for x in PAGING[:2]] == ["page_size", "device_budget"]


def test_exactly_the_design_is_exported():
    exported = {x for x in po.__all__ if x.startswith("paged_")}
    assert exported == set(NAMES)
    for name in (*NAMES, "paged", "plan", "memory_report", "jit_step"):
        assert name in po.__all__
        assert callable(getattr(po, name))


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_optax_then_paging(name):
    own = list(inspect.signature(NAMES[name]).parameters.values())
    found = list(inspect.signature(getattr(po, name)).parameters.values())
    coded = {"codec": "dynamic_int8"} if name.endswith("_8bit") else {}
    paging = [x.replace(default=coded.get(x.name, x.default)) for x in PAGING]
    key = lambda x: (x.name, x.default, x.kind)
    assert list(map(key, found)) == list(map(key, own + paging))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_taken_by_position_and_by_name(name):
    alias, empty = getattr(po, name), inspect.Parameter.empty
    parameters = inspect.signature(NAMES[name]).parameters.values()
    values = {x.name: 1e-3 if x.default is empty else x.default for x in parameters}
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = [values[x.name] for x in parameters if x.kind is by_position]
    assert alias(*positional, page_size="1MiB").init({}) is not None
    assert alias(**{"learning_rate": 1e-3} | values, min_paged_size=0) is not None
    with pytest.raises(TypeError, match="unheard_of"):
        alias(1e-3, unheard_of=1)
    with pytest.raises(ValueError, match="page_size"):
        alias(1e-3, page_size=-1)


@pytest.mark.quick("paged_adamw_8bit", "paged_lion_32bit")
@pytest.mark.parametrize("name", NAMES)
def test_injected_and_accumulated(name):
    """As trainers wrap an optimizer: one program, and the types of its first state."""
    factored = "adafactor" in name  # by sizes, which Optax compares
    inject = functools.partial(
        optax.inject_hyperparams,
        static_args="min_dim_size_to_factor" if factored else (),
        hyperparam_dtype=jnp.float32,
    )
    paging = {"page_size": "8KiB", "min_paged_size": "0B"}
    paged = po.MultiSteps(inject(getattr(po, name))(1e-3, **paging), 2)
    plain = optax.MultiSteps(inject(NAMES[name])(1e-3), 2)
    params, trained = {"w": jnp.ones((64, 128)), "b": jnp.ones(8)}, []
    for tx in (paged, plain):
        traces, values, state = [], params, tx.init(params)
        first = jax.tree.map(jax.typeof, state)

        def update(gradients, state, values, tx=tx, traces=traces):
            traces.append(None)
            return tx.update(gradients, state, values)

        jitted = jax.jit(update, donate_argnums=1)
        for number in range(1, 5):
            gradients = jax.tree.map(lambda x, n=number: n * x, params)
            updates, state = jitted(gradients, state, values)
            values = optax.apply_updates(values, updates)
        if tx is paged:  # Optax's is traced again where it counts in Python's integers
            assert len(traces) == 1
            assert jax.tree.map(jax.typeof, state) == first
        trained.append(values)
    chex.assert_trees_all_close(*trained, rtol=1e-6)


@pytest.mark.parametrize("name", [*NAMES, "paged", "plan", "memory_report", "jit_step"])
def test_docstring_has_every_section(name):
    function = getattr(po, name)
    doc = inspect.getdoc(function)
    for section in ("Args", "Returns", "Raises", "Example"):
        assert re.search(rf"^{section}:$", doc, re.MULTILINE), section
    assert ">>> " in doc
    assert function.__name__ == name
    if name in NAMES:
        assert f"po.{name}(" in doc
        assert ("eight bits" in doc) == name.endswith("_8bit")
