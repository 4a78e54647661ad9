"""The loss of a linear layer by chunks: the numbers of all its logits, in few bytes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import paged_optax as po
from helpers import aot, decoder, layered
from helpers.layered import SETTINGS, far
from paged_optax.losses import Chunks

MIB = 2**20
WORDS = 1000


def arrays(tokens=(3, 7), width=24, words=WORDS, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    normal = lambda key, *shape: jax.random.normal(key, shape)
    return {
        "x": normal(keys[0], *tokens, width).astype(dtype),
        "head": (normal(keys[1], words, width) / width**0.5).astype(dtype),
        "bias": normal(keys[2], words).astype(dtype),
        "labels": jax.random.randint(keys[3], tokens, 0, words),
        "weights": jax.random.uniform(keys[4], tokens),
    }


def cast(given, dtype):
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return {n: x.astype(dtype) if floating(x) else x for n, x in given.items()}


def logits_of(x, head, bias=None, soft_cap=None):
    logits = jnp.einsum("...d,vd->...v", x, head)
    if bias is not None:
        logits = logits + jnp.expand_dims(bias, range(logits.ndim - 1))
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def ordinary(x, head, labels, *, bias=None, soft_cap=None, z_loss=0.0):
    """By Optax, of all logits."""
    logits = logits_of(x, head, bias, soft_cap)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    made = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return made + z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))


def by_chunks(x, head, labels, *, vocab_axis=0, **how):
    """The function itself, whose head is transposed where its axis is the other."""
    head = head.T if vocab_axis else head
    return po.linear_cross_entropy(x, head, labels, vocab_axis=vocab_axis, **how)


def learned(function, given, **how):
    """The weighted sum of the losses, and its gradients."""
    biased = how.pop("biased", False)

    def total(learned):
        bias = {"bias": learned["bias"]} if biased else {}
        losses = function(learned["x"], learned["head"], given["labels"], **bias, **how)
        return jnp.sum(losses * given["weights"].astype(losses.dtype))

    names = ("x", "head", "bias") if biased else ("x", "head")
    run = jax.jit(jax.value_and_grad(total))
    return run({name: given[name] for name in names})


@pytest.mark.usefixtures("strict")
@pytest.mark.quick("all-0", "chunks-1")
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize(
    ("chunk", "how"),
    [
        (None, {}),
        (256, {"biased": True, "soft_cap": 2.0, "z_loss": 0.01}),
        (WORDS, {"biased": True}),
        (999, {"soft_cap": 30.0}),
        (300, {"z_loss": 1e-4}),
        (7, {}),
    ],
    ids=["all", "chunks", "exactly", "but one", "z_loss", "seven"],
)
def test_numbers(chunk, how, vocab_axis):
    given = arrays()
    wanted = learned(ordinary, given, **how)
    found = learned(by_chunks, given, chunk=chunk, vocab_axis=vocab_axis, **how)
    assert far(found, wanted) <= 1e-6
    assert found[0].dtype == jnp.float32


def test_the_logits_are_nowhere():
    """No array of the program has an element for each token and entry."""
    given = arrays((64,))
    run = lambda x, head: by_chunks(x, head, given["labels"], chunk=128).sum()
    closed = jax.make_jaxpr(jax.grad(run, (0, 1)))(given["x"], given["head"])
    shapes = re.findall(r"[fb]f?\d+\[([\d,]+)\]", str(closed))
    largest = max(np.prod([int(n) for n in x.split(",")]) for x in shapes)
    assert largest == given["head"].size < 64 * WORDS


def test_labels_beyond_the_vocabulary():
    """A negative one does not count, and one too large shows."""
    given = arrays((4,))
    labels = given["labels"].at[1].set(-100).at[2].set(WORDS)
    losses = by_chunks(given["x"], given["head"], labels)
    wanted = ordinary(given["x"], given["head"], given["labels"])
    np.testing.assert_allclose(losses[::3], wanted[::3], rtol=1e-6)
    assert losses[1] == 0 and jnp.isnan(losses[2])
    total = lambda x: by_chunks(x, given["head"], labels.at[2].set(-1)).sum()
    gradients = jax.jit(jax.grad(total))(given["x"])
    assert not gradients[1:3].any() and gradients[::3].all()


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    "dtype", [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)]
)
def test_labels_of_other_dtypes(dtype, make):
    """No label beyond int32, or beyond the vocabulary, is another one's by a cast."""
    most, least = np.iinfo(dtype).max, np.iinfo(dtype).min
    given = arrays((8,))
    labels = [3, 120, most, most - 99, most // 2 + 6, least, min(WORDS, most), 7]
    losses = {}
    for x64 in (True, False):
        if not x64 and make is jnp.asarray and "64" in dtype:
            continue  # such an array has 32 bits
        with jax.enable_x64(x64):
            given["labels"] = make(np.array(labels, dtype))
            losses[x64] = by_chunks(given["x"], given["head"], given["labels"])
            counts = np.array([0 <= label < WORDS for label in labels])
            known = jnp.asarray(np.where(counts, labels, 0).astype(np.int32))
            wanted = np.array(ordinary(given["x"], given["head"], known))
            wanted[~counts] = np.where(np.array(labels, object) < 0, 0, np.nan)[~counts]
            np.testing.assert_allclose(losses[x64], wanted, rtol=1e-6)


def test_nothing_to_multiply():
    """Of width 0 all logits are 0; of no vocabulary each label is too large."""
    given = arrays((4,), width=0)
    total = lambda x, head: by_chunks(x, head, given["labels"]).sum()
    loss, gradients = jax.value_and_grad(total, (0, 1))(given["x"], given["head"])
    np.testing.assert_allclose(loss, 4 * np.log(WORDS), rtol=1e-6)
    assert [x.shape for x in gradients] == [(4, 0), (WORDS, 0)]
    labels = given["labels"].at[0].set(-1)
    losses = by_chunks(jnp.ones((4, 8)), jnp.ones((0, 8)), labels)
    assert losses[0] == 0 and jnp.isnan(losses[1:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("masked", [slice(0, 700), slice(700, None), slice(90, 95)])
def test_masked_entries(masked):
    """A bias of minus infinity, of whole chunks too."""
    given = arrays()
    given["bias"] = given["bias"].at[masked].set(-jnp.inf)
    fits = jnp.flatnonzero(jnp.isfinite(given["bias"]))
    given["labels"] = fits[given["labels"] % fits.size]
    how = {"biased": True}
    found = learned(by_chunks, given, chunk=64, **how)
    assert far(found, learned(ordinary, given, **how)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_sixteen_bits(dtype, soft_cap):
    """No worse than all logits in as many bits, by those in float32."""
    given = arrays((16, 32), 64, 4096, dtype)
    exact = learned(ordinary, cast(given, jnp.float32), soft_cap=soft_cap)
    found = learned(by_chunks, given, chunk=512, soft_cap=soft_cap)
    same = learned(ordinary, given, soft_cap=soft_cap)
    lowest = optax.tree.dtype(found, "lowest"), optax.tree.dtype(same, "lowest")
    assert lowest == (dtype, dtype)
    leaves = map(jax.tree.leaves, (found, same, exact))
    for one, other, wanted in zip(*leaves, strict=True):
        assert far(one, wanted) <= 1.02 * far(other, wanted) + 1e-6


@pytest.mark.slow
def test_two_dtypes():
    """Products are then in the wider one, and gradients each in its own."""
    given = arrays() | {"x": arrays()["x"].astype(jnp.bfloat16)}
    found, wanted = learned(by_chunks, given, chunk=256), learned(ordinary, given)
    assert far(found[1]["head"], wanted[1]["head"]) <= 1e-6
    assert far(found[1]["x"], wanted[1]["x"]) <= 1e-2
    assert found[1]["x"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        given = cast(arrays(), jnp.float64)
        found = learned(by_chunks, given, chunk=64)
        assert far(found, learned(ordinary, given)) <= 1e-13
        assert found[0].dtype == jnp.float64


@pytest.mark.slow
def test_numbers_of_torch():
    torch = pytest.importorskip("torch")
    given = arrays()
    labels = given["labels"].at[0, 3].set(-100)
    tensors = {name: torch.tensor(np.asarray(x)) for name, x in given.items()}
    for name in ("x", "head", "bias"):
        tensors[name].requires_grad_()
    logits = tensors["x"] @ tensors["head"].T + tensors["bias"]
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        torch.tensor(np.asarray(labels)).flatten().long(),
        reduction="none",
    )
    total = (losses.reshape(labels.shape) * tensors["weights"]).sum()
    total.backward()
    found = learned(by_chunks, given | {"labels": labels}, chunk=100, biased=True)
    grads = {name: tensors[name].grad.numpy() for name in ("x", "head", "bias")}
    assert far(found, (total.detach().numpy(), grads)) <= 1e-6


SIZES = st.integers(1, 70)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 5), max_size=3),
    width=st.integers(1, 40),
    words=SIZES | st.sampled_from([512, 768, 1000]),
    chunk=st.none() | SIZES | st.integers(100, 1100),
    vocab_axis=st.sampled_from([0, 1]),
    how=st.fixed_dictionaries(
        {},
        optional={
            "biased": st.just(True),
            "soft_cap": st.floats(0.5, 50),
            "z_loss": st.floats(1e-5, 0.1),
        },
    ),
    seed=st.integers(0, 1000),
)
def test_odd_shapes(tokens, width, words, chunk, vocab_axis, how, seed):
    with jax.enable_x64(True):
        given = arrays(tuple(tokens), width, words, seed=seed)
        given = cast(given, jnp.float64)
        wanted = learned(ordinary, given, **how)
        found = learned(by_chunks, given, chunk=chunk, vocab_axis=vocab_axis, **how)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    jax.tree.map(close, found, wanted)


@given(
    vocab=st.integers(1, 300_000),
    axis=st.integers(0, 1),
    tokens=st.integers(0, 100_000),
    width=st.integers(0, 20_000),
    chunk=st.none() | st.integers(1, 300_000),
    one_device=st.booleans(),
)
def test_chunks(vocab, axis, tokens, width, chunk, one_device):
    """Of equal blocks, and of no more entries than asked for."""
    chunks = Chunks.of(vocab, axis, tokens, width, chunk, one_device)
    assert vocab % chunks.blocks == 0
    most = chunk or max(2048, 32 * MIB // max(tokens, width, 1))
    assert min(most, vocab) / 2 < chunks.blocks * chunks.size <= most


TRANSFORMED = {
    "vmap": lambda f: jax.vmap(f, (0, None, 0)),
    "both": lambda f: (
        lambda x, head, labels: jax.vmap(f)(x, jnp.stack([head] * len(x)), labels)
    ),
    "scan": lambda f: (
        lambda x, head, labels: jax.lax.map(lambda y: f(y[0], head, y[1]), (x, labels))
    ),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name):
    given = arrays()
    found = learned(TRANSFORMED[name](functools.partial(by_chunks, chunk=256)), given)
    assert far(found, learned(ordinary, given)) <= 1e-6


@pytest.mark.slow
def test_gradients_of_gradients():
    given = arrays()

    def penalty(function, x):
        loss = lambda x: function(x, given["head"], given["labels"]).sum()
        return jnp.sum(jnp.square(jax.grad(loss)(x)))

    found, wanted = (
        jax.jit(jax.grad(functools.partial(penalty, function)))(given["x"])
        for function in (functools.partial(by_chunks, chunk=256), ordinary)
    )
    assert far(found, wanted) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["x", "head"])
def test_what_is_frozen_has_no_product(frozen):
    given = arrays()

    def products(wrt):
        run = lambda x, head: by_chunks(x, head, given["labels"], chunk=512).sum()
        compiled = jax.jit(jax.grad(run, wrt)).lower(given["x"], given["head"])
        return compiled.compile().as_text().count(" dot(")

    all_of_them = products((0, 1))
    assert products(1 if frozen == "x" else 0) == all_of_them * 3 // 4


def placed(given, mesh, tokens, head):
    """Arrays on a mesh: tokens divided so, and the head."""
    specs = {"x": P(*tokens), "head": P(*head)}
    put = lambda name, x: jax.device_put(
        x, NamedSharding(mesh, specs.get(name, P(*tokens[:1])))
    )
    return {name: put(name, given[name]) for name in given if name != "bias"}


@pytest.mark.quick("tokens by head-explicit")
@pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
@pytest.mark.parametrize(
    ("tokens", "head"),
    [
        (("a",), ()),
        (("a",), ("b",)),
        ((), (("a", "b"),)),
        ((("a", "b"),), (("a", "b"),)),
        (("a", None, "b"), (None, "b")),
    ],
    ids=["tokens", "tokens by head", "head", "both by all", "width"],
)
def test_on_a_mesh(kind, tokens, head):
    given = arrays((8, 6), 32, 1024)
    wanted = learned(ordinary, given)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        there = placed(given, mesh, tokens, head)
        found = learned(by_chunks, there, chunk=256)
    assert far(found, wanted) <= 1e-6
    assert found[1]["head"].sharding.is_equivalent_to(there["head"].sharding, 2)


def test_a_head_that_its_type_does_not_divide():
    """Traced by its shape, as `split_layers` does: no device then gathers all of it."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    place = lambda *spec: NamedSharding(mesh, P(*spec))
    make = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

    def loss(head, x):
        labels = jnp.zeros(len(x), jnp.int32)
        return po.linear_cross_entropy(x, head, labels, vocab_axis=1, chunk=1024).mean()

    given, over = (place(None, "x"), place()), place(None, "x")
    grad = jax.jit(jax.grad(loss), in_shardings=given, out_shardings=over)
    text = grad.lower(make(32, 8192), make(16, 32)).compile().as_text()
    assert "all-gather" not in text


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(check_vma):
    given = arrays((8, 6), 32, 1024)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def function(x, head, labels):
        return jax.shard_map(
            functools.partial(by_chunks, chunk=256),
            mesh=mesh,
            in_specs=(P("a"), P(), P("a")),
            out_specs=P("a"),
            check_vma=check_vma,
        )(x, head, labels)

    assert far(learned(function, given), learned(ordinary, given)) <= 1e-6


@pytest.mark.quick("tied")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_in_a_layerwise_step(tied):
    """Masked micro-batches of unequal weights, on the epilogue's own terms."""

    def epilogue(function, rest, x, kept, batch):
        losses = function(x * rest["norm"], rest, batch["targets"])
        mask = batch["mask"]
        return po.WeightedLoss(jnp.sum(losses * mask), mask.sum())

    def chunked(x, rest, labels):
        if tied:
            return po.linear_cross_entropy(x, rest["embed"], labels, chunk=40)
        return po.linear_cross_entropy(x, rest["head"], labels, vocab_axis=1, chunk=40)

    def whole(x, rest, labels):
        return ordinary(x, rest["embed"] if tied else rest["head"].T, labels)

    batch = layered.batch(shape=(2, 4, 8))
    batch["mask"] = (jnp.arange(64).reshape(2, 4, 8) < 41).astype(jnp.float32)
    # Of gradients near 0 Adam makes steps of a sign that rounding decides, without eps.
    tx = po.paged_adamw(1e-2, eps=1e-5, **SETTINGS)
    made = []
    for function in (chunked, whole):
        params = layered.parameters(3, tied)
        last = functools.partial(epilogue, function)
        model = po.LayerwiseModel(layered.prologue, layered.layer, last)
        step = po.layerwise_step(model, tx, max_norm=0.5, accumulate=True)
        workspace = po.GradientWorkspace.allocate(params["layers"])
        args = params, tx.init(params), workspace
        params, _, _, output = layered.run(step, *args, [batch] * 3)
        made.append((params, output.loss, output.gradient_norm))
    assert far(made[0], made[1]) <= 5e-6


TOKENS, WIDTH, VOCABULARY, LLAMA3_WORDS = 8192, 2560, 151936, 128256
REPLICATED = P()


def program(
    function, vocab_axis=0, tokens=REPLICATED, head=REPLICATED, words=VOCABULARY
):
    """What `aot` compiles: loss and gradients, in bfloat16."""

    def build(mesh):
        place = lambda spec: NamedSharding(mesh, spec, memory_kind="device")
        make = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
            shape, dtype, sharding=place(spec)
        )
        shape = (WIDTH, words) if vocab_axis else (words, WIDTH)
        args = (
            make((TOKENS, WIDTH), jnp.bfloat16, tokens),
            make(shape, jnp.bfloat16, head),
            make((TOKENS,), jnp.int32, tokens),
        )
        mean = lambda *arrays: function(*arrays).mean()
        places = place(P()), (place(tokens), place(head))
        return jax.jit(jax.value_and_grad(mean, (0, 1)), out_shardings=places), args

    return build


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
@pytest.mark.parametrize("vocab_axis", [0, 1])
@pytest.mark.parametrize("words", [VOCABULARY, LLAMA3_WORDS])
def test_bytes(compile_for, vocab_axis, words):
    """Few chunks, and the head's gradient is in no other buffer than its own."""
    function = functools.partial(po.linear_cross_entropy, vocab_axis=vocab_axis)
    report = compile_for(program(function, vocab_axis, words=words))
    assert report.device_temp <= 280 * MIB


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("compile_for", [aot.h200, aot.v5e])
def test_bytes_of_all_logits(compile_for):
    """What it is compared with, in its docstring too."""
    report = compile_for(program(ordinary))
    assert 7100 * MIB <= report.device_temp <= 7150 * MIB
    assert "| Optax, all logits | 7122 | 7122 |" in po.linear_cross_entropy.__doc__


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "head", "most"),
    [
        (P("x"), P(), 120),
        (P(), P("x"), 200),
        (P("x"), P("x"), 120),
        (P("x"), P(None, "x"), 220),
    ],
    ids=["tokens", "vocabulary", "both", "width"],
)
def test_bytes_on_a_mesh(tokens, head, most):
    """No device has more than a chunk of the head, but where it was given it whole."""
    build = program(po.linear_cross_entropy, 0, tokens, head)
    report = aot.h200(build, devices=8)
    assert report.device_temp <= most * MIB


class Chunked(decoder.Decoder):
    """Whose loss never has all logits."""

    def epilogue(self, rest, x, kept, batch):
        x = decoder._normalised(x, rest["norm"])
        return po.linear_cross_entropy(x, rest["embed"], batch["targets"]).mean()


@pytest.mark.compiler
@pytest.mark.slow
def test_bytes_of_a_layerwise_step():
    """Qwen3-4B with its weights on the host: 6.0 GiB for 8192 tokens, and not 11.0.

    Before jax 0.11.2, which fetches no weights ahead, 5.6 and 9.4.
    """
    fields = dataclasses.fields(decoder.QWEN3_4B)
    model = Chunked(**{x.name: getattr(decoder.QWEN3_4B, x.name) for x in fields})
    tx = po.paged_adamw(1e-4, master_dtype="float32")
    build = decoder.layerwise(model, tx, weights_on_host=True, size=(16, 512))
    assert aot.h200(build).device_total <= 6.1 * 2**30
