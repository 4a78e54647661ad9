"""Models that nobody rewrote, trained layer by layer: as by `jax.grad` and Optax."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import paged_optax as po
from helpers import zoo
from helpers.split_trained import RATE, STEPS, by_layers, close, split, trained

QUICK = (
    "a_list",
    "a_scan",
    "dropout",
    "frozen_base_closed_over",
    "lora",
    "nnx_list",
    "two_kinds_and_a_literal",
)


#: Of the first some gradients are near 1e-8 at first, which is Adam's own eps, and
#: float32 has some of them 2% to 10% wrong: Adam would make a step of the rounding. The
#: loss of the second doubles and falls to an eighth in five steps. How far these are
#: apart depends on the processor: by 1e-8 one had them 1.0e-5 and 1.1e-5 apart.
EPS = {"distilled": 1e-6, "two_encoders": 1e-6}
SOME = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in zoo.MODELS
]


@pytest.mark.parametrize("name", SOME)
def test_trains_as_optax(name):
    loss, params, batch, *frozen = zoo.MODELS[name]()
    model = split(loss, params, batch, *frozen)
    unstacked = model.unstack(model.stack(params))
    jax.tree.map(np.testing.assert_array_equal, unstacked, params)
    eps = EPS.get(name, 1e-8)
    tx = po.paged_adamw(RATE, eps=eps, page_size=4096, min_paged_size=0)
    stacked, losses, _ = by_layers(model, tx, params, batch, frozen)
    plain = optax.adamw(RATE, eps=eps)
    wanted, theirs = trained(loss, params, frozen, [batch] * STEPS, plain)
    np.testing.assert_allclose(losses, theirs, rtol=1e-5)
    close(model.unstack(stacked), wanted)


def test_a_batch_of_another_shape():
    loss, params, batch = zoo.MODELS["dropout"]()
    model = po.split_layers(loss, params, batch)
    stacked = model.stack(params)
    shorter = batch | {"tokens": batch["tokens"][:1, :5]}
    value = jax.jit(model.loss)(stacked, shorter)
    np.testing.assert_allclose(value, jax.jit(loss)(params, shorter), rtol=1e-6)


def test_shapes_are_enough():
    loss, params, batch = zoo.MODELS["a_list"]()
    shapes = jax.eval_shape(lambda: params)
    model = po.split_layers(loss, shapes, jax.eval_shape(lambda: jnp.asarray(batch)))
    stacked = model.stack(shapes)
    assert stacked["layers"]["up"].shape == (4, zoo.WIDTH, 2 * zoo.WIDTH)
    shape_of = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shape_of(model.unstack(stacked)) == shape_of(params)


def test_the_first_layer_is_like_the_others():
    """What it computes of the embeddings alone is traced in another order."""

    def loss(params, batch):
        x = params["embed"][batch]
        for layer in params["layers"]:
            mean = x.mean(-1, keepdims=True)
            inverse = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
            inverse = layer["scale"] * inverse
            x = x + jnp.tanh(inverse * (x - mean) @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    batch = zoo.TOKENS
    assert "kinds" not in str(po.split_layers(loss, zoo.parameters(), batch))


PRINTED = {
    "a_scan": ["layers, a scan", "kept of each layer +float32", "4 x 4 B"],
    "dense_first": ["layers/0/dense"],
    "encoder_and_decoder": [
        "held whole +encoder/., 3 layers, with their gradients +7.0 KiB",
        r"seen by all layers +float32\[2, 8, 24\]",
    ],
    "judged": [r"held whole +layers/., 4 layers, frozen +36"],
    "lora": ["parameters, of each layer +2 arrays", "frozen, of no layer +embed, norm"],
    # A sum of norms is made after the layers, also where it begins with others.
    "norms_of_all_weights": [
        r"carried.* layer +float32\[2, 8, 24\] +4 x 1.5 KiB",
        r"kept of each layer +float32\[\], float32\[\], float32\[\] ",
    ],
    "two_kinds_and_a_literal": [
        r"layers/\*[^$]*AB, repeated[^$]*6 x 9.1 KiB[^$]*embed, norm",
        r"outside +float32\[2, 8, 48\] at plain.py:\d+",
        r"carried, saved for each layer[^\n]*float32\[2, 8, 24\]",
        "for each layer another",
    ],
    "nnx_list": [r"blocks/\*", r"at modules.py:\d+ \(Decoder.__call__\)"],
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_each_model_has(name):
    loss, params, batch, *frozen = zoo.MODELS[name]()
    model = split(loss, params, batch, *frozen)
    for pattern in PRINTED[name]:
        assert re.search(pattern, str(model)), str(model)
    assert len(repr(model)) < 60


@pytest.mark.parametrize("name", zoo.TOWERS)
def test_towers_save_one_activation_each(name):
    """Not the next layer's beginning of those that are traced first."""
    text = str(split(*zoo.MODELS[name]()))
    assert "kinds" not in text and "kept" not in text
    row = next(x for x in text.splitlines() if x.startswith("carried"))
    others = re.search(r", (\d+) more", row)
    found = row.count("float32") + (int(others[1]) if others else 0)
    assert found == zoo.TOWERS[name]


def products(name):
    """How many matrix products XLA:CPU's program of a step has."""
    loss, params, batch, *frozen = zoo.MODELS[name]()
    model, tx = split(loss, params, batch, *frozen), optax.sgd(RATE)
    stacked, fixed = model.stack(params), [model.stack_frozen(x) for x in frozen]
    given = stacked, model.init(tx, stacked), model.workspace(stacked), batch, *fixed
    step = jax.jit(po.layerwise_step(model, tx))
    return step.lower(*given).compile().as_text().count(" dot(")


def test_a_frozen_teacher_has_no_backward_pass():
    """Two products of each of its layers, and one of its head, are all it has."""
    alone = products("a_list")
    assert products("distilled") == alone + 3
    assert products("preferences") == 2 * (alone + 3)


def test_larger_layers_that_cannot_be_cut_are_printed():
    params = zoo.parameters() | {"small": [{"w": jnp.eye(zoo.WIDTH)}] * 3}

    def run(params, x, batch):
        for each in params["small"]:
            x = x @ each["w"]
        return twice(params, x, batch)

    text = str(po.split_layers(zoo.around(run), params, zoo.TOKENS))
    assert "small/*" in text
    assert re.search(r"layers/\*, 36.* is not split: .* used after all", text)


def twice(params, x, batch):
    for each in (*params["layers"], params["layers"][0]):
        x = zoo.mlp(each, x)
    return x


def skips(params, x, batch):
    held = []
    for n, each in enumerate(params["layers"]):
        x = zoo.mlp(each, x + held.pop() if n >= 4 else x)
        held += [x] * (n < 4)
    return x


def prints(params, x, batch):
    jax.debug.print("{}", x)
    return zoo.in_turn(params, x, batch)


def reversed_scan(params, x, batch):
    turn = lambda x, each: (zoo.mlp(each, x), None)
    return jax.lax.scan(turn, x, params["layers"], reverse=True)[0]


def again(params, x, batch):
    first, *others = params["layers"]
    for each in (first, others[0], first, *others[1:]):
        x = zoo.mlp(each, x)
    return x


def prints_within(params, x, batch):
    def turn(x, scale):
        jax.debug.print("{}", x)
        return x * scale, None

    return jax.lax.scan(turn, zoo.in_turn(params, x, batch), jnp.ones(2))[0]


def together(params, x, batch):
    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
    return jax.lax.scan(lambda x, each: (zoo.mlp(each, x), None), x, layers)[0]


@pytest.mark.parametrize(
    ("run", "count", "says"),
    [
        (twice, 3, r"after all layers, at \S*plain.py:\d+.*Move parameters"),
        (
            again,
            3,
            r"layer 0 is used at \S*plain.py:\d+.* after layer 1.*Move parameters",
        ),
        (skips, 8, r"plain.py:\d+.* skips layers.*Give the layers before"),
        (prints, 3, r"debug_print` at \S*test_split_models.py:\d+.*Leave it out"),
        (prints_within, 3, r"debug_print` at .*:\d+:\d+ \(prints_within.*turn\)"),
        (reversed_scan, None, r"test_\S*:\d+.* in reverse: turn the"),
        (together, 3, r"together at \S*test_split_models.py:\d+.*stack them before"),
    ],
)
def test_refused_by_the_line(run, count, says):
    """Losses of a list of layers, or of stacks."""
    params = zoo.parameters(count) if count else zoo.MODELS["a_scan"]()[1]
    with pytest.raises(po.SplitError, match=says):
        po.split_layers(zoo.around(run), params, zoo.TOKENS)


def test_the_line_is_the_models_and_not_flaxs():
    graph, params = nnx.split(zoo.Decoder(rngs=nnx.Rngs(0)))

    def loss(params, batch):
        model = nnx.merge(graph, params)
        model.blocks.append(model.blocks[0])
        return zoo.cross_entropy(model(batch[:, :-1]), batch)

    wanted = r"at \S*modules.py:\d+ \(Block.__call__\), which calls .*flax.*py"
    with pytest.raises(po.SplitError, match=wanted):
        po.split_layers(loss, params, zoo.TOKENS)


def norms(params, x, batch):
    """A list of modules, and a list of arrays beside it."""
    for each, scale in zip(params["layers"], params["norms"], strict=True):
        x = zoo.mlp(each, x) * scale
    return x


def encoded(params, x, batch):
    """Two lists of the same length, one after the other."""
    seen = x
    for scale in params["norms"]:
        seen = jnp.tanh(seen * scale)
    for each in params["layers"]:
        x = zoo.mlp(each, x + seen)
    return x


@pytest.mark.parametrize(
    ("run", "shown"), [(norms, "all lists"), (encoded, r"layers/\*")]
)
def test_lists_of_the_same_length(run, shown):
    """They are layers' together where the loss takes them so."""
    scales = [jnp.full(zoo.WIDTH, 1.0 + n) for n in range(3)]
    params = zoo.parameters(3) | {"norms": scales}
    loss = zoo.around(run)
    model = po.split_layers(loss, params, zoo.TOKENS)
    assert re.search(f"layers +{shown} +3", str(model))
    assert "is not split" not in str(model)
    stacked = model.stack(params)
    jax.tree.map(np.testing.assert_array_equal, model.unstack(stacked), params)
    value = jax.jit(model.loss)(stacked, zoo.TOKENS)
    np.testing.assert_allclose(value, loss(params, zoo.TOKENS), rtol=1e-6)


def test_what_is_named_is_not_looked_for_in_one_layer():
    """Its refusal would be lost."""
    square = jnp.eye(4)
    params = {"layers": [{"parts": [{"w": square}, {"w": square}]}] * 3}

    def loss(params, batch):
        for layer in params["layers"]:
            for part in layer["parts"]:
                batch = jnp.tanh(batch @ part["w"])
        return jnp.mean(batch), params["layers"][0]["parts"]

    with pytest.raises(po.SplitError, match="returns a parameter of layer 0"):
        po.split_layers(loss, params, jnp.ones((2, 4)), layers="layers")


def test_parts_that_are_numbered_are_no_layers():
    """Vectors alone do not tell a stack of them from a list."""
    params = {"layers": [{"part_0": {"scale": jnp.ones(4)}}] * 3}

    def loss(params, batch):
        for layer in params["layers"]:
            batch = jnp.tanh(batch * layer["part_0"]["scale"])
        return jnp.mean(batch)

    model = po.split_layers(loss, params, jnp.ones((2, 4)))
    stacked = model.stack(params)
    assert model.workspace(stacked)
    assert stacked["layers"]["layer"]["part_0"]["scale"].shape == (3, 4)
    close(model.unstack(stacked), params)


def test_names_that_are_flat():
    loss, params, batch = zoo.MODELS["flat_names"]()
    for layers in (None, "model.layers", "model.layers.*"):
        stacked = po.split_layers(loss, params, batch, layers=layers).stack(params)
        assert set(stacked["layers"]["mlp"]) == {"scale", "up", "down"}


@pytest.mark.parametrize("other", ["a", "a/b", "a.b"])
def test_names_that_are_the_same_if_they_are_parted(other):
    loss, params, batch = zoo.MODELS["a_list"]()
    params["a/b"], params["a"] = jnp.ones(3), {"b": jnp.zeros(3)}
    params[other] = jnp.full(3, 2.0)
    model = po.split_layers(loss, params, batch)
    stacked = model.stack(params)
    jax.tree.map(np.testing.assert_array_equal, model.unstack(stacked), params)


def test_layers_without_anything_to_train():
    """The head alone is trained; adapters would be numbered as the layers are."""
    loss, params, batch = zoo.MODELS["a_list"]()
    layers = {"layers": params.pop("layers")}
    with pytest.raises(po.SplitError, match="no parameters that are trained"):
        po.split_layers(lambda p, f, b: loss(p | f, b), params, batch, frozen=layers)


def test_the_batch_before_the_parameters():
    loss, params, batch = zoo.MODELS["a_list"]()
    swapped = lambda params, batch: loss(params, batch["tokens"].astype("int32"))
    batch = {"tokens": jnp.asarray(batch)}
    assert po.split_layers(swapped, params, batch)
    with pytest.raises(TypeError, match=r"Parameters precede the batch: split"):
        po.split_layers(swapped, batch, params)


def test_frozen_parameters_that_are_missing():
    loss, params, batch, frozen = zoo.MODELS["lora"]()
    model = po.split_layers(loss, params, batch, frozen=frozen)
    with pytest.raises(TypeError, match="frozen is missing: .* model.stack_frozen"):
        model.loss(model.stack(params), batch)
