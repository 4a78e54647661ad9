"""What a layerwise step must give: the numbers of `jax.grad` and Optax, or an error."""

import collections
import dataclasses
import types

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paged_optax as po

SETTINGS = {"page_size": 4096, "min_paged_size": 0}
STACK = {"w": jnp.full((2, 64, 64), 0.01)}
BATCH = jnp.ones((4, 64))


def start(rest, batch):
    return batch, None


def layer(weights, x, context, i):
    return x + x @ weights["w"], None


def finish(rest, x, kept, batch):
    return jnp.mean(jnp.abs(x) ** 2)


def mean_loss(functions, accumulate=False):
    """The loss as one function of all parameters, for `jax.grad`."""
    prologue, layer, epilogue = functions

    def loss(params, batch):
        rest = {name: params[name] for name in params if name != "layers"}
        x, context = prologue(rest, batch)
        kept = []
        for i in range(len(jax.tree.leaves(params["layers"])[0])):
            weights = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            x, made = layer(weights, x, context, jnp.int32(i))
            kept.append(made)
        result = epilogue(
            rest, x, jax.tree.map(lambda *xs: jnp.stack(xs), *kept), batch
        )
        return result[0] if isinstance(result, tuple) else result

    if not accumulate:
        return loss
    each = lambda batch: [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(3)]
    return lambda params, batch: sum(loss(params, b) for b in each(batch)) / 3


def both(
    params,
    tx,
    functions=(start, layer, finish),
    batch=BATCH,
    host_dtype=None,
    offloaded=False,
    **how,
):
    """One layerwise step, and one of `jax.grad` and the same transformation."""
    step = jax.jit(po.layerwise_step(*functions, tx, **how))
    workspace = po.GradientWorkspace.allocate(params["layers"], host_dtype=host_dtype)
    layers = po.offload(params["layers"], 0) if offloaded else params["layers"]
    given = params | {"layers": layers} if offloaded else params
    found = step(given, tx.init(params), workspace, batch)
    gradients = jax.grad(mean_loss(functions, how.get("accumulate", False)))(
        params, batch
    )
    norm = optax.tree.norm(gradients)
    if how.get("max_norm"):
        clip = optax.clip_by_global_norm(how["max_norm"])
        gradients, _ = clip.update(gradients, optax.EmptyState())
    updates, state = tx.update(gradients, tx.init(params), params)
    return found, (optax.apply_updates(params, updates), state, norm)


def same(found, wanted, rtol=2e-6):
    """Same tree, same numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(found)[0],
        jax.tree.leaves(wanted),
        strict=True,
    ):
        np.testing.assert_allclose(
            np.asarray(a),
            np.asarray(b),
            rtol,
            rtol * float(np.max(np.abs(np.asarray(b)), initial=0.0)),
            err_msg=jax.tree_util.keystr(path),
        )


@pytest.mark.quick("offloaded")
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"max_norm": 0.5},
        {"offloaded": True, "activations_on_host": True},
        {"accumulate": True},
        {"accumulate": True, "max_norm": 0.5},
        {"accumulate": True, "max_norm": 0.5, "host_dtype": jnp.float32},
    ],
    ids=lambda how: "+".join(how) or "plain",
)
def test_gradients_through_context(how):
    """What all layers see of the parameters, they are trained by."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "emb": jax.random.normal(keys[0], (64, 64)) * 0.1,
        "scale": jnp.ones(()),
        "layers": {"w": jnp.full((3, 64, 64), 0.01)},
    }

    def prologue(rest, batch):
        context = {
            "seen": batch @ rest["emb"],
            "fixed": batch @ jax.lax.stop_gradient(rest["emb"]),
            "scale": rest["scale"],
            "table": jnp.linspace(0.5, 1.5, 3),
            "key": jax.random.key(1),
        }
        return batch, context

    def through(weights, x, context, i):
        other = context["seen"] * context["scale"] + context["fixed"]
        noise = jax.random.normal(jax.random.fold_in(context["key"], i), x.shape)
        x = x + (x + other * context["table"][i]) @ weights["w"] + 0.01 * noise
        return x, jnp.mean(other * x)

    def epilogue(rest, x, kept, batch):
        return jnp.mean(x**2) + jnp.sum(kept)

    shape = (3, 4, 64) if how.get("accumulate") else (4, 64)
    batch = jax.random.normal(keys[1], shape)
    functions = prologue, through, epilogue
    found, wanted = both(params, po.paged_sgd(1.0, **SETTINGS), functions, batch, **how)
    same(found[0], wanted[0], 1e-5)
    same(found[3].gradient_norm, wanted[2])
    assert float(jnp.max(jnp.abs(found[0]["emb"] - params["emb"]))) > 1e-3


def test_context_of_no_parameters_adds_nothing_up():
    """Tables and keys are differentiated by nobody: no buffer is kept for them."""
    table = jnp.ones((4, 64))
    step = po.layerwise_step(
        lambda rest, batch: (batch @ rest["emb"], {"table": table, "causal": True}),
        lambda w, x, context, i: (x + (x + context["table"]) @ w["w"], None),
        finish,
        tx := po.paged_sgd(1.0, **SETTINGS),
    )
    params = {"emb": jnp.eye(64), "layers": STACK}
    workspace = po.GradientWorkspace.allocate(params["layers"])
    jaxpr = jax.make_jaxpr(step)(params, tx.init(params), workspace, BATCH)
    loops = [x for x in jaxpr.eqns if x.primitive.name == "while"]
    shapes = [[v.aval.shape for v in loop.outvars].count((4, 64)) for loop in loops]
    assert shapes == [1, 1]  # the activations, and their gradient


@jax.tree_util.register_pytree_with_keys_class
class Ordered(collections.UserDict):
    """A mapping of a library's own, whose leaves come in the order of insertion."""

    def tree_flatten_with_keys(self):
        keys = jax.tree_util.DictKey
        return [(keys(name), x) for name, x in self.data.items()], tuple(self.data)

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(zip(names, children, strict=True))


@pytest.mark.quick("OrderedDict")
@pytest.mark.parametrize(
    "mapping",
    [
        dict,
        collections.OrderedDict,
        lambda entries: collections.defaultdict(list, entries),
        flax.core.FrozenDict,
        nnx.State,
        lambda entries: nnx.State(jax.tree.map(nnx.Param, entries)),
        Ordered,
    ],
    ids=["dict", "OrderedDict", "defaultdict", "FrozenDict", "State", "Param", "own"],
)
def test_mappings(mapping):
    """Whatever order a mapping's leaves have, each keeps its own state and mask."""
    value = lambda x: x[...]  # of an array, or of Flax's variable
    params = mapping(
        {
            "z": jnp.ones((64, 64)),
            "layers": mapping({"w": STACK["w"], "b": jnp.zeros((2, 64))}),
            "a": jnp.eye(64),
        }
    )
    functions = (
        lambda rest, batch: (batch @ value(rest["a"]), None),
        lambda w, x, context, i: (x + x @ value(w["w"]) + value(w["b"]), None),
        finish,
    )
    name = lambda path: path[0].key
    mask = lambda p: jax.tree_util.tree_map_with_path(lambda k, x: name(k) != "z", p)
    tx = optax.chain(
        po.paged(optax.trace(0.9), **SETTINGS),
        optax.masked(optax.scale(-1e-2), mask),
    )
    found, wanted = both(params, tx, functions)
    same(found[0], wanted[0])
    same(found[1], wanted[1])
    assert type(found[0]) is type(params)
    assert float(jnp.max(jnp.abs(found[1][0].trace["z"]))) == 0
    if isinstance(params, collections.defaultdict):
        assert found[0].default_factory is list


def test_parameters_that_are_no_mapping():
    """They are refused by their type's name."""
    model = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("Model", ["layers", "head"]), ["layers", "head"], []
    )
    step = po.layerwise_step(start, layer, finish, po.paged_sgd(1.0))
    workspace = po.GradientWorkspace.allocate(STACK)
    unknown = types.MappingProxyType({"layers": STACK})
    for params, word in ((model(STACK, None), "Model"), (unknown, "mappingproxy")):
        with pytest.raises(ValueError, match=rf"{word}.*'layers'"):
            step(params, (), workspace, BATCH)


def test_workspace_of_another_order():
    """Its buffers are one layer's leaves in the same order, or it is refused."""
    stacks = {"w": jnp.full((2, 64, 64), 0.01), "b": jnp.full((2, 64, 64), 0.01)}
    params = {"layers": collections.OrderedDict(stacks)}
    tx = po.paged_sgd(1.0)
    workspace = po.GradientWorkspace.allocate(stacks, accumulate="b")
    functions = (start, lambda w, x, c, i: (x @ w["w"] + x @ w["b"], None), finish)
    with pytest.raises(ValueError, match=r"\['w'\].*allocate"):
        po.layerwise_step(*functions, tx)(params, tx.init(params), workspace, BATCH)


def widened(rest, x, kept, batch):
    """A loss whose gradients are as large as the batch says."""
    return jnp.mean(jnp.abs(x) ** 2) * batch["scale"]


@pytest.mark.quick("None-0.5")
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("host_dtype", [None, jnp.complex64])
def test_complex_norm(max_norm, host_dtype):
    """Imaginary parts count."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "emb": jax.random.normal(keys[0], (64, 64), jnp.complex64) * 0.1,
        "layers": {"w": jax.random.normal(keys[1], (2, 64, 64), jnp.complex64) * 0.1},
    }
    functions = (lambda rest, batch: (batch @ rest["emb"], None), layer, finish)
    batch = jax.random.normal(keys[2], (4, 64), jnp.complex64)
    tx = po.paged_sgd(1.0, **SETTINGS)
    found, wanted = both(
        params, tx, functions, batch, max_norm=max_norm, host_dtype=host_dtype
    )
    same(found[3].gradient_norm, wanted[2])
    same(found[0], wanted[0], 1e-5)


@pytest.mark.quick("float64-float64")
@pytest.mark.parametrize("host_dtype", [None, "float32", "float64"])
@pytest.mark.parametrize("rest_dtype", ["float32", "float64"])
def test_norm_in_float64(rest_dtype, host_dtype):
    """Squares beyond float32's largest number are none beyond float64's."""
    with jax.enable_x64(True):
        params = {
            "shift": jnp.zeros(64, rest_dtype),  # Optax squares it in its own dtype
            "layers": {"w": jnp.full((2, 64, 64), 0.01, "float64")},
        }
        functions = (
            lambda rest, b: (b["x"] + 1e-12 * rest["shift"].astype("float64"), None),
            layer,
            widened,
        )
        batch = {"x": jnp.ones((4, 64), "float64"), "scale": jnp.float64(1e21)}
        found, wanted = both(
            params,
            optax.sgd(1.0),
            functions,
            batch,
            max_norm=0.5,
            host_dtype=host_dtype,
        )
        assert found[3].gradient_norm.dtype == "float64"
        assert float(wanted[2]) > 1e20
        same(found[3].gradient_norm, wanted[2], 1e-6)
        same(found[0], wanted[0], 1e-6)


def test_real_workspace_of_complex_layers():
    """It would drop imaginary parts, and is refused."""
    layers = {"w": jnp.ones((2, 64, 64), jnp.complex64)}
    for name in ("dtype", "host_dtype"):
        with pytest.raises(ValueError, match=rf"{name}=float32.*\['w'\].*complex64"):
            po.GradientWorkspace.allocate(layers, **{name: "float32"})


@pytest.mark.quick("host_dtype")
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"max_norm": 0.5, "activations_on_host": True},
        {"accumulate": True},
        {"accumulate": True, "max_norm": 0.5, "host_dtype": jnp.float32},
    ],
    ids=lambda how: "+".join(how) or "plain",
)
def test_activations_without_gradients(how):
    """Integers, keys and Python's numbers go from layer to layer as floats do."""
    key = jax.random.key(0)
    params = {"emb": jax.random.normal(key, (64, 64)) * 0.1, "layers": STACK}

    def prologue(rest, batch):
        x = {"h": batch @ rest["emb"], "n": jnp.arange(4), "key": key, "sum": 0.0}
        return x, {"table": jnp.arange(4), "causal": 1}

    def through(weights, x, context, i):
        key, mine = jax.random.split(x["key"])
        noise = jax.random.normal(mine, (64,))
        h = x["h"] + x["h"] @ weights["w"] * x["n"][:, None] + 0.01 * noise
        n = (x["n"] + context["table"] + context["causal"]) % 3
        total = x["sum"] + jnp.mean(h)
        return {"h": h, "n": n, "key": key, "sum": total}, (jnp.sum(n), 1.0)

    def epilogue(rest, x, kept, batch):
        return jnp.mean(x["h"] ** 2 * x["n"][:, None]) + x["sum"] + jnp.sum(kept[1])

    shape = (3, 4, 64) if how.get("accumulate") else (4, 64)
    batch = jax.random.normal(key, shape)
    functions = prologue, through, epilogue
    found, wanted = both(params, po.paged_sgd(1.0, **SETTINGS), functions, batch, **how)
    same(found[0], wanted[0], 1e-5)
    same(found[3].gradient_norm, wanted[2])


@pytest.mark.parametrize(
    ("params", "batch", "words"),
    [
        ({"n": jnp.arange(3)}, BATCH, r"\['n'\].*int32"),
        ({"layers": STACK | {"n": jnp.zeros((2, 3), int)}}, BATCH, r"\['n'\].*int32"),
        ({"layers": {"w": jnp.ones((0, 64, 64))}}, BATCH, r"\{0: .*\['w'\]"),
        (
            {},
            {"x": jnp.ones((3, 4, 64)), "t": 2.0},
            r"accumulate=True.*batch\['t'\] of shape \(\).*jnp\.full",
        ),
        (
            {},
            {"x": jnp.ones((3, 4, 64)), "t": jnp.ones(2)},
            r"accumulate=True.*\['t'\] of shape \(2,\).*\['x'\] of shape \(3, 4, 64\)",
        ),
        ({}, {"x": jnp.ones((0, 4, 64))}, r"accumulate=True.*shape \(0, 4, 64\)"),
        ({}, {}, "accumulate=True.*no arrays"),
    ],
    ids=["rest", "layers", "none", "scalar", "lengths", "empty", "nothing"],
)
@pytest.mark.parametrize("host_dtype", [None, jnp.float32], ids=["device", "host"])
def test_refused_arrays(params, batch, words, host_dtype):
    """The message names the array and the way out."""
    params = {"layers": STACK} | params
    tx = optax.sgd(1.0)
    with pytest.raises(ValueError, match=words):
        step = po.layerwise_step(
            start, layer, finish, tx, accumulate=batch is not BATCH
        )
        workspace = po.GradientWorkspace.allocate(
            params["layers"], host_dtype=host_dtype
        )
        jax.jit(step)(params, tx.init(params), workspace, batch)


def large(params):
    """Chosen by what Optax sees: the size of a whole stack."""
    return jax.tree.map(lambda x: x.size > 5000, params)


PER_ELEMENT = {
    "layers": {
        "w": jnp.linspace(0.1, 1.0, 8192).reshape(2, 64, 64),
        "v": jnp.ones((2, 64, 96)),
        "b": jnp.ones((2, 64)),
    },
    "head": jnp.linspace(0.5, 1.0, 4096).reshape(64, 64),
}


@pytest.mark.quick("masked", "labels", "length", "array")
@pytest.mark.parametrize(
    "make",
    [
        lambda: po.paged_adamw(0.1, weight_decay=0.5, mask=large, **SETTINGS),
        lambda: optax.masked(po.paged_sgd(0.1, momentum=0.9, **SETTINGS), large),
        lambda: optax.partition(
            {
                True: po.paged_sgd(0.1, **SETTINGS),
                False: po.paged_lion(0.2, **SETTINGS),
            },
            large,
        ),
        lambda: po.paged(
            optax.stateless(
                lambda updates, _: jax.tree.map(lambda g: g / len(g), updates)
            )
        ),
        lambda: optax.chain(
            po.paged_sgd(0.1, momentum=0.9, **SETTINGS),
            optax.stateless(
                lambda updates, _: jax.tree.map(jnp.multiply, updates, PER_ELEMENT)
            ),
        ),
        lambda: po.paged_adamw(
            0.1, weight_decay=0.5, mask=large, per_parameter_steps=True, **SETTINGS
        ),
        lambda: po.paged_adamw(
            0.1,
            weight_decay=0.5,
            mask=large,
            codec={"head": "dynamic_int8"},
            **SETTINGS,
        ),
    ],
    ids=["decay", "masked", "labels", "length", "array", "own_steps", "coded_head"],
)
def test_what_is_chosen_by_shape(make):
    """A mask, a label or a factor is that of the whole stack, not of one layer."""
    params = {
        "layers": {
            "w": jnp.full((2, 64, 64), 0.01),
            "v": jnp.ones((2, 64, 96)),
            "b": jnp.zeros((2, 64)),
        },
        "head": jnp.eye(64),
    }
    functions = (
        start,
        lambda w, x, c, i: (x + jnp.tanh(x @ w["w"] + w["b"]), None),  # not of "v"
        lambda rest, x, kept, batch: jnp.mean((x @ rest["head"]) ** 2),
    )
    tx = make()
    batch = jax.random.normal(jax.random.key(0), (4, 64))
    found, wanted = both(params, tx, functions, batch)
    same(found[0], wanted[0], 1e-5)
    same(found[1], wanted[1], 1e-5)
    kind = lambda tree: jax.tree.map(lambda x: x.sharding.memory_kind, tree)
    assert kind(found[1]) == kind(tx.init(params))


@pytest.mark.quick("-bfloat16-")
@pytest.mark.parametrize("codec", ["dynamic_int8", "bfloat16", "bfloat16_stochastic"])
def test_coded_moments_chosen_by_shape(codec):
    """One layer's codes are updated alone: a mask must be given as it is, in bools."""
    params = {"layers": {"w": jnp.ones((2, 64, 64)), "v": jnp.ones((2, 128, 64))}}
    functions = (start, lambda w, x, c, i: (x + x @ w["w"], None), finish)
    make = lambda mask: po.paged_adamw(
        0.1, weight_decay=0.5, mask=mask, codec=codec, **SETTINGS
    )
    with pytest.raises(ValueError, match=r"\['w'\].*shape.*tree of bools.*codec"):
        both(params, make(large), functions)
    found, wanted = both(params, make(large(params)), functions)
    np.testing.assert_allclose(found[0]["layers"]["v"], 0.95, 1e-6)
    same(found[0], wanted[0], 1e-2)
