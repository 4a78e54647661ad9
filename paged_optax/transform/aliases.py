"""The optimizers users know by name, paged.

Each takes the parameters of its Optax optimizer, under their names and with their
defaults, and then those of `paged`. Hugging Face and bitsandbytes use the names that
end in `_32bit` and `_8bit`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from paged_optax.transform.paged import paged

_PAGING = tuple(
    parameter
    for parameter in inspect.signature(paged).parameters.values()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)

_EIGHT_BITS = "dynamic_int8"


def _alias(
    name: str,
    optimizer: Callable[..., optax.GradientTransformation],
    source: str,
    codec: str | None = None,
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Builds `paged(optimizer(...))` as a function with one signature for both."""
    own = inspect.signature(optimizer)
    paging = [
        parameter.replace(default=codec) if parameter.name == "codec" else parameter
        for parameter in _PAGING
    ]
    names = {parameter.name for parameter in paging}

    def build(*args: object, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        chosen = {key: kwargs.pop(key) for key in names & kwargs.keys()}
        chosen.setdefault("codec", codec)
        return paged(optimizer(*args, **kwargs), **chosen)

    stored, promise = "", "the same numbers, a few pages of moments on the device"
    if codec is not None:
        stored = ", eight bits a value"
        promise = "a quarter of the host memory and of the link's traffic"
    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    build.__doc__ = f"""`{source}`, its moments in host memory{stored}.

    `paged({source}(...))`: {promise}.

    Args:
      ...: `{source}`'s own, under their names and with their defaults; then
        `page_size`, `device_budget`, `codec` and the others of `paged`.

    Returns:
      A transformation whose state has the structure of `{source}`'s.

    Raises:
      ValueError: As `paged`.

    Example:
      >>> import jax.numpy as jnp, optax, paged_optax as po
      >>> params = jnp.ones((512, 512))
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), po.{name}(1e-3))
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates.shape
      (512, 512)

    References:
      The optimizer: `optax` documentation, `{source}`.
    """
    signature = own.replace(
        parameters=[*own.parameters.values(), *paging],
        return_annotation=optax.GradientTransformationExtraArgs,
    )
    # Functions declare no such attribute, so a plain assignment fails the type check.
    setattr(build, "__signature__", signature)  # noqa: B010
    return build


paged_adamw = _alias("paged_adamw", optax.adamw, "optax.adamw")
paged_adam = _alias("paged_adam", optax.adam, "optax.adam")
paged_nadamw = _alias("paged_nadamw", optax.nadamw, "optax.nadamw")
paged_lion = _alias("paged_lion", optax.lion, "optax.lion")
paged_ademamix = _alias(
    "paged_ademamix", optax.contrib.ademamix, "optax.contrib.ademamix"
)
paged_sgd = _alias("paged_sgd", optax.sgd, "optax.sgd")
paged_rmsprop = _alias("paged_rmsprop", optax.rmsprop, "optax.rmsprop")
paged_adagrad = _alias("paged_adagrad", optax.adagrad, "optax.adagrad")
paged_lamb = _alias("paged_lamb", optax.lamb, "optax.lamb")
paged_lars = _alias("paged_lars", optax.lars, "optax.lars")
paged_adafactor = _alias("paged_adafactor", optax.adafactor, "optax.adafactor")
paged_muon = _alias("paged_muon", optax.contrib.muon, "optax.contrib.muon")

paged_adamw_32bit = _alias("paged_adamw_32bit", optax.adamw, "optax.adamw")
paged_lion_32bit = _alias("paged_lion_32bit", optax.lion, "optax.lion")
paged_ademamix_32bit = _alias(
    "paged_ademamix_32bit", optax.contrib.ademamix, "optax.contrib.ademamix"
)

paged_adamw_8bit = _alias("paged_adamw_8bit", optax.adamw, "optax.adamw", _EIGHT_BITS)
paged_lion_8bit = _alias("paged_lion_8bit", optax.lion, "optax.lion", _EIGHT_BITS)
paged_ademamix_8bit = _alias(
    "paged_ademamix_8bit",
    optax.contrib.ademamix,
    "optax.contrib.ademamix",
    _EIGHT_BITS,
)
