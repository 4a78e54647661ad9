"""Random models taken apart by `split_layers`, beside `jax.grad` and Optax.

A recipe is a dictionary of numbers and names, which `split_recipes` draws.
`python tests/helpers/split_fuzz.py` answers with what differs of the recipes that it is
asked for, see `apart`.
"""

import contextlib
import functools
import importlib
import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import paged_optax as po
from helpers import apart, broken, quick_compiler
from helpers.split_models import Model
from helpers.split_ops import NARROW
from helpers.split_plain import Recipe, whole
from paged_optax.backend.platforms import GPU_FETCHES_AHEAD

#: Nearly all of a case is XLA:CPU's compiler. What is bfloat16 is rounded after each
#: operation, whatever it is fused with.
FLAGS = f"--xla_allow_excess_precision=false {quick_compiler.FLAGS}"

#: An accelerator's way, beside a CPU's, is traced and never run here.
step_module = importlib.import_module("paged_optax.layerwise.step")

Numbers = dict[str, float]

_is_matrix = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
_is_large = lambda params: jax.tree.map(lambda x: x.size > 12, params)


def _rated(updates: Any, params: Any) -> Any:
    """Another rate for each leaf, and so for each layer."""
    leaves, structure = jax.tree.flatten(updates)
    scaled = [(1 + n % 5) / 4 * x for n, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, scaled)


#: They see the tree that the loss takes. A gradient of rounding errors alone must not
#: become a whole step: `eps`.
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "muon": optax.contrib.muon(0.01, eps=1e-2),
    "lamb": optax.lamb(0.01, eps=1e-2),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "mask by shape": optax.adamw(0.01, eps=1e-2, weight_decay=0.5, mask=_is_matrix),
    "mask by size": optax.adamw(0.01, eps=1e-2, weight_decay=0.5, mask=_is_large),
    "rate by leaf": optax.chain(
        optax.scale_by_adam(eps=1e-2), optax.stateless(_rated), optax.scale(-0.01)
    ),
}

#: Of a stack of matrices these have no numbers by layer.
BY_MATRIX = ("muon", "lamb", "adaptive clip")

#: What refusals say where there are no layers but other lists.
NO_LAYERS = ("no layers", "two layers", "are trained", "does not use layer")

#: Of a loss that is finite in one of both.
NOT_FINITE = {"losses": np.inf}


def _flat(tree: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """A tree's arrays by dtype, behind one another, and what makes a tree of such.

    All trees look alike to XLA. Optax's transformations that are compared make each
    value of its own.
    """
    leaves, structure = jax.tree.flatten(tree)
    vectors, ends = {}, {}
    for dtype in ("bfloat16", "float32"):
        parts = [np.ravel(x) for x in leaves if x.dtype == dtype]
        ends[dtype] = np.cumsum([x.size for x in parts], dtype=int)
        room = np.zeros(-sum(x.size for x in parts) % _ROOM, jnp.dtype(dtype))
        vectors[dtype] = np.concatenate([*parts, room])

    def tree_of(vectors: dict[str, Any]) -> Any:
        split = lambda dtype: iter(np.split(np.asarray(vectors[dtype]), ends[dtype]))
        parts = {dtype: split(dtype) for dtype in vectors}
        made = [next(parts[str(x.dtype)]).reshape(x.shape) for x in leaves]
        return jax.tree.unflatten(structure, map(jnp.asarray, made))

    return vectors, tree_of


_ROOM = 1 << 14


@functools.cache
def _update(
    adamw: bool, max_norm: float | None, optimizer: str | None = None
) -> Callable[..., Any]:
    """A step of Optax's."""
    tx = optax.adamw(**_ADAMW) if adamw else optax.sgd(**_SGD)
    tx = OPTIMIZERS[optimizer] if optimizer else tx
    if max_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(max_norm), tx)

    @jax.jit
    def run(params: Any, gradients: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return lambda params, gradients, state: run(
        params, gradients, tx.init(params) if state is None else state
    )


#: A gradient of rounding errors alone must not become a whole step.
_ADAMW, _SGD = {"learning_rate": 0.01, "eps": 1e-2}, {"learning_rate": 0.1}


def _paged(recipe: Recipe) -> optax.GradientTransformation:
    """The same, paged; small leaves stay on the device if they are not."""
    if recipe["optimizer"]:
        tx = OPTIMIZERS[recipe["optimizer"]]
        paging = {"page_size": 4096, "min_paged_size": 0}
        return po.paged(tx, **paging) if recipe["paged"] else tx
    size: Any = 0 if recipe["paged"] else "1MiB"
    how = {"page_size": 4096, "min_paged_size": size}
    return (
        po.paged_adamw(**_ADAMW, **how)
        if recipe["adamw"]
        else po.paged_sgd(**_SGD, **how)
    )


def narrow(model: Model) -> bool:
    """Whether some of it is computed in fewer bits than float32 has."""
    cast = model.recipe["cast"] in ("bfloat16", "in layer")
    return model.recipe["dtype"] != "float32" or cast or bool(NARROW & model.used)


class Case:
    """A recipe's model and how it is trained.

    Args:
      recipe: The recipe.
    """

    def __init__(self, recipe: Recipe):
        self.recipe, self.model = recipe, Model(recipe)
        # Gradients add up in another order, and differ in their last bits. Of bfloat16
        # these are a 256th of each; in a step's parameters a hundredth of the next
        # gradients, which so are not compared.
        steps, self.tolerance = (1, 3e-2) if narrow(self.model) else (2, 1e-5)
        self.batches = [self.model.batch(1 + n) for n in range(steps)]
        if recipe["then"] == "number" and not recipe["accumulate"]:
            self.batches = [self._last(batch, 0.75) for batch in self.batches]
        self.found = Numbers()

    def split(self) -> Any:
        """The model taken apart, of other parameters and another batch."""
        (params, frozen), batch = self.model.params(7), self.model.batch(8)
        if self.recipe["accumulate"]:
            batch = jax.tree.map(lambda x: x[0], batch)
        then = self.recipe["then"]
        if then == "array":
            batch = self._last(batch, 0.75)
        if then == "dtype":
            other = {"float32": jnp.bfloat16, "bfloat16": jnp.float32}
            cast = lambda x: x.astype(other.get(str(x.dtype), x.dtype))
            params, frozen = jax.tree.map(cast, (params, frozen))
        given = params, batch, frozen
        if self.recipe["abstract"]:
            given = jax.eval_shape(lambda *x: x, *given)
        params, batch, frozen = given
        how = {} if frozen is None else {"frozen": frozen}
        if self.recipe["named"]:
            how["layers"] = self.model.tree.name
        return po.split_layers(self.model.loss, params, batch, **how)

    def _last(self, batch: Any, value: Any) -> Any:
        """A batch with another last value."""
        if isinstance(batch, tuple):
            return (*batch[:4], value)
        name = "back" if self.recipe["then"] == "order" else "scale"
        return batch | {name: value}

    def around(self, plain: bool = False) -> Any:
        """What is around the training; `plain`: around that by `jax.grad`."""
        then = self.recipe["then"]
        if then == "precision":
            return jax.default_matmul_precision("highest")
        if then == "Auto" or (then == "Explicit" and not plain):
            kind = jax.sharding.AxisType[then]
            return jax.set_mesh(jax.make_mesh((1,), ("d",), (kind,)))
        return contextlib.nullcontext()

    def backward(self, split: Any) -> None:
        """Raises unless another order of the layers is refused, or computed.

        It is computed where the parts of one block are the layers that were found, and
        keep their order.
        """
        params, frozen = self.model.params(0)
        stacked = () if frozen is None else (split.stack_frozen(frozen),)
        given = () if frozen is None else (frozen,)
        batch = self._last(self.one(), jnp.ones(()))
        try:
            found = split.loss(split.stack(params), *stacked, batch)
        except ValueError:
            return
        wanted = self.model.loss(params, *given, batch)
        wanted, found = (_parted(x)[::2] for x in (wanted, found))
        self.compare("another order", wanted, found, self.tolerance)
        if self.found:
            raise AssertionError("another order of the layers is taken for the first")

    def mean(
        self, loss: Callable[..., Any], params: Any, frozen: Any, batch: Any
    ) -> tuple[Array, Any]:
        """What a step is of: the loss of all micro-batches, and their metrics."""
        given = () if frozen is None else (frozen,)
        if not self.recipe["accumulate"]:
            return _parted(loss(params, *given, batch))[::2]
        each = lambda batch: _parted(loss(params, *given, batch))
        made, weights, metrics = jax.lax.map(each, batch)
        return jnp.sum(made * weights) / jnp.sum(weights), metrics

    def start(self, moved: int) -> tuple[Any, Any]:
        """Parameters, and frozen ones; their last bits changed by a seed, if it is."""
        params, frozen = self.model.params(0)
        move = functools.partial(_moved, np.random.default_rng(moved))
        return jax.tree.map(move, params) if moved else params, frozen

    def expected(self, moved: int = 0) -> tuple[list[Array], list[Any], Any]:
        """Each step's loss and metrics, and the parameters after the last."""
        params, frozen = self.start(moved)
        loss = functools.partial(self.mean, self.model.loss)
        grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
        optimizer = self.recipe["optimizer"]
        update = _update(self.recipe["adamw"], self.recipe["max_norm"], optimizer)
        state, losses, said = None, [], []
        for batch in self.batches:
            (loss, metrics), gradients = grad(params, frozen, batch)
            if optimizer:  # it sees the shapes
                params, state = update(params, gradients, state)
            else:
                vectors, tree_of = _flat(params)
                vectors, state = update(vectors, _flat(gradients)[0], state)
                params = tree_of(vectors)
            losses.append(loss)
            said.append(metrics)
        return losses, said, params

    def trained(self, split: Any) -> tuple[list[Array], list[Any], Any]:
        """The same by a layerwise step."""
        recipe, tx = self.recipe, _paged(self.recipe)
        params, frozen = self.model.params(0)
        where = {"on_host": recipe["on_host"], "min_size": 0}
        before = params
        params = split.stack(params, **where)
        self.compare("unstack(stack)", before, split.unstack(params), 0)
        if frozen is not None:
            frozen = split.stack_frozen(frozen, **where)
        step = po.layerwise_step(
            split,
            tx,
            max_norm=recipe["max_norm"],
            accumulate=recipe["accumulate"],
            activations_on_host=recipe["activations_on_host"],
        )
        how: Recipe = {"host_dtype": "float32"} if recipe["workspace"] else {}
        if recipe["workspace"] == "deferred":
            how["rest"] = True
        args = params, split.init(tx, params), split.workspace(params, **how)
        last = () if frozen is None else (frozen,)
        losses, said, compiled = [], [], None
        for batch in self.batches:
            given = *args, batch, *last
            compiled = compiled or po.jit_step(step, *given, donate_argnums=(0, 1, 2))
            *args, output = compiled(*given)
            losses.append(output.loss)
            said.append(output.metrics)
        if recipe["workspace"] == "deferred":
            args = jax.jit(step.finish)(*args)
        return losses, said, split.unstack(args[0])

    def one(self) -> Any:
        """The first batch, or its first micro-batch."""
        batch = self.batches[0]
        first = self.recipe["accumulate"]
        return jax.tree.map(lambda x: x[0], batch) if first else batch

    def gradients(self, moved: int = 0) -> tuple[Array, Any]:
        """The loss of one batch, and its gradients; `moved` as for `start`."""
        params, frozen = self.start(moved)
        given = () if frozen is None else (frozen,)
        plain = lambda p: _parted(self.model.loss(p, *given, self.one()))[0]
        return jax.jit(jax.value_and_grad(plain))(params)

    def alone(self, split: Any) -> None:
        """Compares the loss of stacked parameters, and its gradients, of one batch."""
        params, frozen = self.model.params(0)
        stacked = () if frozen is None else (split.stack_frozen(frozen),)
        alone = lambda p: _parted(split.loss(split.stack(p), *stacked, self.one()))[0]
        with self.around(plain=True):
            wanted, theirs = self.gradients()
        with self.around():
            loss, ours = jax.jit(jax.value_and_grad(alone))(params)
        self.compare("gradients", theirs, ours, 10 * self.tolerance)
        self.compare("loss", wanted, loss, self.tolerance)

    def beyond_rounding(self) -> Numbers:
        """What differs by more than the model does from itself, rounded otherwise.

        Where an `abs` or a `relu` turns, or a `max` chooses, a last bit decides; and so
        many layers enlarge it. A hundredth is no rounding of any model. Some last bits
        matter less than others: several are tried; and twice as much is allowed, as
        each operation rounds, not the parameters alone.
        """
        differs, self.found = self.found, Numbers()
        losses, said, params = self.expected()
        for seed in range(1, 9):
            known, self.found = self.found, Numbers()
            others = self.expected(moved=seed)
            self.compare("losses", losses, others[0], 0)
            self.compare("metrics", said, others[1], 0)
            self.compare("parameters", params, others[2], 0)
            if any(name.startswith(("gradients", "loss ")) for name in differs):
                (loss, by), (other, moved) = self.gradients(), self.gradients(seed)
                self.compare("gradients", by, moved, 0)
                self.compare("loss", loss, other, 0)
            for name, x in known.items():
                self.found[name] = max(x, self.found.get(name, 0))
        most = lambda name: min(2 * self.found.get(name, 0), 1e-2)
        return {name: x for name, x in differs.items() if x > most(name)}

    def compare(self, name: str, wanted: Any, found: Any, most: float) -> None:
        """Notes what is further apart than `most` of the largest."""
        if jax.tree.structure(wanted) != jax.tree.structure(found):
            structures = jax.tree.structure(wanted), jax.tree.structure(found)
            raise AssertionError(f"{name}: {structures[0]} became {structures[1]}")
        flat, _ = jax.tree_util.tree_flatten_with_path(wanted)
        largest = max((_largest(x) for _, x in flat), default=0.0)
        for (path, a), b in zip(flat, jax.tree.leaves(found), strict=True):
            a, b = jnp.asarray(a), jnp.asarray(b)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise AssertionError(f"{name}: {a.aval} became {b.aval}")
            distance = _largest(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            scale = max(_largest(a), 0.05 * largest, 1e-30)
            if not distance <= most * scale:
                where = f"{name} {jax.tree_util.keystr(path)}"
                self.found[where] = float(f"{distance / scale:.1e}")


def _moved(draw: np.random.Generator, x: Array) -> Array:
    """The next number or the one before, as is drawn."""
    if x.dtype != jnp.float32:
        return x
    away = np.where(draw.integers(2, size=x.shape), np.inf, -np.inf)
    return jnp.asarray(np.nextafter(np.asarray(x), away.astype(np.float32)))


def _parted(made: Any) -> tuple[Array, Array, Any]:
    """A loss as a mean, its weight among micro-batches, and its metrics."""
    metrics = None
    if isinstance(made, tuple) and not isinstance(made, po.WeightedLoss):
        made, metrics = made
    if isinstance(made, po.WeightedLoss):
        weight = jax.lax.stop_gradient(made.weight)
        return made.total / weight, weight, metrics
    return made, jnp.float32(1), metrics


def _largest(x: Any) -> float:
    return float(np.max(np.abs(np.asarray(x, np.float64)), initial=0.0))


def run(recipe: Recipe) -> Numbers:
    """What differs, by name; nothing of a recipe that is right.

    Raises:
      ValueError: If a model is not taken apart that should be.
      AssertionError: If one is that should not be.
    """
    recipe = whole(recipe)
    case = Case(recipe)
    outside = recipe["penalty"] and case.model.tree.axis is not None
    # Few layers side by side may be taken apart: their input goes through all of them.
    # So may layers that are used twice, if what they make depends on the batch alone.
    perhaps = recipe["refused"] in ("side by side", "twice")
    if (recipe["refused"] or outside) and not perhaps:
        return _refused(case)
    ahead = recipe["ahead"] and GPU_FETCHES_AHEAD
    step_module._OVERLAPPED = ("cpu",) if ahead else ()
    try:
        split = case.split()
    except ValueError as error:
        said = str(error)
        # Of one layer another list may be tried: its parts, frozen or unused ones.
        none = any(x in said for x in NO_LAYERS)
        if (perhaps or case.model.few()) and (_names_a_line(said) or none):
            return {}
        raise
    assert str(split)
    if recipe["then"] == "order":
        case.backward(split)
    with case.around(plain=True):
        case.losses, said, params = case.expected()
    finite = lambda losses: [bool(np.isfinite(x)) for x in losses]
    if not all(finite(case.losses)):
        # Few layers grow without bound; then there are no numbers to compare.
        return (
            {} if finite(case.trained(split)[0]) == finite(case.losses) else NOT_FINITE
        )
    if recipe["alone"]:
        case.alone(split)
    with case.around():
        losses, metrics, trained = case.trained(split)
    case.compare("losses", case.losses, losses, case.tolerance)
    case.compare("metrics", said, metrics, 10 * case.tolerance)
    case.compare("parameters", params, trained, case.tolerance)
    with case.around(plain=True):
        return case.beyond_rounding() if case.found else {}


def _refused(case: Case) -> Numbers:
    """Nothing, if one sentence names a line of the model."""
    try:
        split = case.split()
    except ValueError as error:
        said = str(error)
        # What the loss returns is no equation, which has a line.
        returned = case.recipe["refused"] == "returned" and "the loss returns" in said
        if not (returned or _names_a_line(said)):
            raise AssertionError(f"names no line of the model: {said}") from error
        return {}
    raise AssertionError(f"{case.recipe['refused']} is not refused: {split}")


def _names_a_line(said: str) -> bool:
    return re.search(r"split_\w+\.py:\d+", said) is not None


if __name__ == "__main__":
    broken.break_by_name()
    jax.config.update("jax_traceback_in_locations_limit", 0)
    apart.answer(lambda recipe: run(json.loads(recipe)), jax.clear_caches, every=50)
