"""Layers that run several times side by side: teachers, pairs, two encoders."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from helpers.zoo.plain import TOKENS, cross_entropy, in_turn, model, parameters, rms

#: What each saves for a layer: one activation of every tower.
TOWERS = {"distilled": 2, "preferences": 4, "siamese": 2, "two_encoders": 2}


def logits_of(params, tokens):
    x = in_turn(params, params["embed"][tokens[:, :-1]], tokens)
    return rms(x, params["norm"]) @ params["embed"].T


def other() -> dict:
    """A model of the same shapes."""
    return jax.tree.map(lambda x: 1.1 * x, parameters())


@model
def distilled():
    """A frozen teacher, computed first."""

    def loss(params, frozen, batch):
        wanted = jax.nn.softmax(logits_of(frozen, batch))
        ours = jax.nn.log_softmax(logits_of(params, batch))
        return optax.losses.kl_divergence(ours, wanted).mean()

    return loss, parameters(), TOKENS, other()


@model
def preferences():
    """DPO (https://arxiv.org/abs/2305.18290): two answers, and a frozen reference."""
    pairs = np.random.default_rng(1).integers(0, 48, (2, *TOKENS.shape))

    def score(params, tokens):
        labels = tokens[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels
        return -each(logits_of(params, tokens), labels).sum(-1)

    def loss(params, frozen, batch):
        chosen, rejected = (
            score(params, batch[n]) - score(frozen, batch[n]) for n in range(2)
        )
        return -jax.nn.log_sigmoid(0.1 * (chosen - rejected)).mean()

    return loss, parameters(), pairs, other()


@model
def judged():
    """A frozen model of the same structure, of what the trained one makes."""

    def loss(params, frozen, batch):
        x = in_turn(params, params["embed"][batch], batch)
        return jnp.mean(in_turn(frozen, x, batch) ** 2)

    return loss, parameters(), TOKENS, other()


@model
def siamese():
    """The same layers of two inputs."""

    def loss(params, batch):
        embedded = [params["embed"][x] for x in (batch[:, :-1], batch[:, 1:])]
        first, second = (in_turn(params, x, batch) for x in embedded)
        near = jnp.mean((first - second) ** 2)
        logits = rms(first, params["norm"]) @ params["embed"].T
        return cross_entropy(logits, batch) + near

    return loss, parameters(), TOKENS


@model
def two_encoders():
    """Two lists, whose inputs are as long as each other or not, as CLIP's."""
    params = parameters()
    params |= {"text": {"layers": params.pop("layers")}}
    params |= {"image": {"layers": other()["layers"]}}

    def loss(params, batch):
        x = params["embed"][batch]
        text = in_turn(params["text"], x[:, :5], batch).mean(1)
        image = in_turn(params["image"], x[:, 5:], batch).mean(1)
        scores = rms(text, params["norm"]) @ image.T
        labels = jnp.arange(len(scores))
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    return loss, params, TOKENS
