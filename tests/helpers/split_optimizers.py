"""Optimizers of random models, which see the tree that the loss takes."""

import jax
import optax

import paged_optax as po


def _is_matrix(params: object) -> object:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _is_large(params: object) -> object:
    return jax.tree.map(lambda x: x.size > 12, params)


def _rated(updates: object, params: object) -> object:
    """Another rate for each leaf, and so for each layer."""
    leaves, structure = jax.tree.flatten(updates)
    scaled = [(1 + n % 5) / 4 * x for n, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, scaled)


#: A gradient of rounding errors alone must not become a whole step: `eps`.
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


def paged(name: str, is_paged: bool) -> optax.GradientTransformation:
    """One of them, with its moments on the host if so."""
    tx = OPTIMIZERS[name]
    return po.paged(tx, page_size=4096, min_paged_size=0) if is_paged else tx
