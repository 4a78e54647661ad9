"""`paged`: any Optax transformation, with its state in host memory."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import PyTree

from paged_optax.backend.memory import PINNED_HOST, resolve_host_memory_kind
from paged_optax.backend.text import parse_bytes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import brief, check_transformation, floating_dtype
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.transform.checks import paged_by_one
from paged_optax.transform.codec_rules import Rule, check, draws
from paged_optax.transform.init import init
from paged_optax.transform.paged_transformation import PagedTransformation
from paged_optax.transform.parameter_shardings import ParameterShardings
from paged_optax.transform.precision import counted, in_float32, with_master_weights
from paged_optax.transform.remainders import with_master_remainders
from paged_optax.transform.update import stream_update, update


def paged(
    inner: optax.GradientTransformation,
    *,
    page_size: int | str = DEFAULT_PAGE_SIZE,
    device_budget: int | str | None = "0B",
    min_paged_size: int | str = "256KiB",
    host_memory_kind: str = "pinned_host",
    shardings: PyTree = None,
    per_parameter_steps: bool = False,
    codec: Rule | Mapping[str, Rule] = None,
    master_dtype: DTypeLike | None = None,
    master_remainders: bool | str = False,
    on_moved: str = "warn",
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the moments of `inner` in host memory; results are unchanged.

    `update` streams each leaf's moments through the device, one page after the other:

    .. math::
        (u_p, s_p) \leftarrow \mathrm{inner}(g_p, s_p, \theta_p)
        \quad\text{for each page } p \text{ of each leaf.}

    Updates overwrite the gradients' buffers, and new moments overwrite the old ones: if
    gradients and state are donated, a step allocates a few pages and nothing else.
    `paged` traces `inner.update` to choose the pages: blocks of rows if it is
    element-wise, whole leaves if it computes within a leaf.

    The state is Optax's own: the tree, shapes and dtypes of `inner.init(params)`, with
    its larger arrays in host memory. A checkpoint of `inner` loads into `paged(inner)`.
    `update` reads the memory of each array off its type: it streams host leaves, and
    updates device leaves in place.

    `update(..., active=...)` updates some parameters only (mixtures of experts,
    adapters, sampled or frozen layers). `active` is a pytree of bools, static or
    traced, of the gradients' structure or a prefix of it. The other parameters keep
    their moments and, with `per_parameter_steps`, their step counts; their updates are
    zero, and no byte of theirs crosses the link. Counts that all parameters share stand
    still when no parameter is active.

    Args:
      inner: The transformation. It may not combine several parameters: chain
        `optax.clip_by_global_norm` and its like outside.
      page_size: The most bytes of one page of one moment, an int or a string such as
        `"16MiB"`; with a codec, bytes of the decoded float32. A leaf has at least 16
        pages, unless they would be smaller than 1 MiB, or a page has to be a whole
        leaf. `"auto"` is at most `"16MiB"`, and on a GPU the fastest number of pages,
        see `docs/how_it_works.md`. On a CPU, which has no link, a leaf is one page if
        `page_size` is 1 MiB or more (with remainders or a codec, 16 MiB), except with a
        codec of blocks.
      device_budget: Bytes of moments that may stay on the device: 0 pages all but small
        moments, None pages nothing. `"auto"` takes the free memory at `init` less a
        reserve: the bytes of the parameters, for gradients, and a quarter of the
        device.
      min_paged_size: Moments of fewer bytes stay on the device, because small transfers
        are bound by latency. Moments of one shape and dtype count as one if each has an
        eighth of these bytes or more, such as adapters. With a codec these are encoded
        bytes: 256 KiB are 65,536 values in float32, 258,000 in eight bits.
      host_memory_kind: `"pinned_host"`, or `"auto"` to keep the moments on the device
        if a backend has no pinned host memory.
      shardings: The parameters' shardings over a mesh, if the arrays do not have them:
        a pytree of `NamedSharding` or `PartitionSpec`, of the parameters' structure or
        a prefix of it. See `paged_optax.engine.shards`.
      per_parameter_steps: True if each parameter counts its own steps, for its bias
        corrections and schedules. Each integer scalar of the state is then a tree of
        the parameters' structure.
      codec: Storage of moments: the name of a codec (`"dynamic_int8"`,
        `"dynamic_int4"`, `"float8_e4m3"`, `"bfloat16"`, `"bfloat16_stochastic"`), an
        object of `paged_optax.codecs` or with its methods, or a dictionary of them,
        whose keys are names of moments and patterns of parameter paths: `{"mu":
        "bfloat16", "nu": "dynamic_int8", "*/embedding": "float32"}`. A key that is a
        parameter's path is no pattern. If several keys match, the last one wins.
        `inner` computes in float32. Moments of fewer than 4096 values are stored in
        float32. A codec by name spends no bit on the sign of Optax's moments of
        squares, such as `nu`; for a moment of your own, pass the codec: `{"*":
        "dynamic_int8", "energy": DynamicInt8(signed=False)}`. A block with NaN or an
        infinity decodes to NaN or an infinity: use `apply_if_finite`.
      master_dtype: Keeps a copy of the parameters in this dtype, paged like a moment,
        for parameters in fewer bits: `"float32"`. The moments have this dtype too.
        Masters of either kind follow their parameters: if anything else changes a
        parameter, such as a chained transformation, a wrapper around this one, or a
        restore of weights alone, its master moves by the same amount. If no update in
        the parameter's dtype reaches the rounded master, as at a change of sign, the
        master absorbs the difference: in bfloat16 at most 1/128 of the step. Steps
        below a unit of the parameter are returned as whole units: put
        `optax.scale(0.1)`, which shrinks steps, inside `paged`.
      master_remainders: True if the float32 master copy of a bfloat16 parameter is
        stored as the 16 bits that complete it: half the bytes, and half the traffic.
        The masters equal `master_dtype="float32"`, except for rare roundings. `"int8"`
        stores 8 of these bits of matrices, for rates of 1e-6 or more; see the guide.
      on_moved: Action of `update`, and of `layerwise_step` for its workspace, if arrays
        have left the host: `"warn"`, or `"raise"` before XLA compiles them.
        `place_state` moves them back.

    Returns:
      A transformation that replaces `inner`.

    Raises:
      ValueError: If an argument is invalid. `update` raises it if `inner` combines
        parameters, if it has effects such as `jax.debug.print`, or if parameters or
        gradients are in host memory.
      TypeError: At `init`, if a parameter has no floating point or complex dtype.

    Example:
      >>> import jax.numpy as jnp, optax, paged_optax as po
      >>> tx = po.paged(optax.lion(1e-4), page_size="1MiB")
      >>> params = {"w": jnp.ones((512, 512))}
      >>> state = tx.init(params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'
      >>> updates, state = tx.update(params, state, params)
      >>> optax.tree.get(state, "mu")["w"].sharding.memory_kind
      'pinned_host'

    References:
      Dettmers et al., `QLoRA <https://arxiv.org/abs/2305.14314>`_, 2023, for paged
      optimizers; `paged_optax.engine.stream` describes the streaming.
    """
    check_transformation("inner", inner)
    if host_memory_kind not in ("auto", PINNED_HOST):
        # This starts JAX's backend, which is only acceptable if it raises.
        resolve_host_memory_kind(host_memory_kind)
    if on_moved not in ("warn", "raise"):
        raise ValueError(f"on_moved={on_moved!r}: pass 'warn' or 'raise'.")
    if device_budget is not None and device_budget != "auto":
        device_budget = parse_bytes("device_budget", device_budget, extra=_AUTO)
    rules = check(codec)
    inner = paged_by_one(optax.with_extra_args_support(inner))
    if master_remainders not in (False, True, "int8"):
        given = brief(master_remainders)
        raise ValueError(f"master_remainders={given}: pass True or 'int8'.")
    dtype = None
    if master_dtype is not None:
        dtype = floating_dtype("master_dtype", master_dtype)
    if master_remainders and dtype not in (None, jnp.float32):
        raise ValueError(
            f"master_dtype={brief(master_dtype)} and"
            f" master_remainders={master_remainders!r}, which completes bfloat16 to"
            " float32: leave master_dtype out."
        )
    if master_remainders:
        bits = jnp.int8 if master_remainders == "int8" else jnp.int16
        inner = with_master_remainders(inner, bits)
    elif dtype is not None:
        inner = with_master_weights(inner, dtype)
    elif rules:
        # Codecs store float32, of parameters in fewer bits too.
        inner = in_float32(inner)
    if draws(rules):
        # Outermost: the count is the state's first leaf, and seeds each step's noise.
        inner = counted(inner)
    transformation = PagedTransformation(
        inner,
        None
        if page_size == DEFAULT_PAGE_SIZE
        else parse_bytes("page_size", page_size, 1, _AUTO),
        device_budget,
        parse_bytes("min_paged_size", min_paged_size),
        host_memory_kind,
        rules,
        per_parameter_steps,
        ParameterShardings(shardings),
        on_moved,
    )
    streamed = functools.partial(stream_update, transformation)
    jitted = jax.jit(streamed, static_argnames="traced")
    return optax.GradientTransformationExtraArgs(
        functools.partial(init, transformation),
        functools.partial(update, transformation, jitted),
    )


_AUTO = "'auto', "  # of sizes that may be chosen

# Half a unit of an 8-bit remainder is 2^-17 of the parameter: 1e-6 for a parameter of
# 0.13. Steps of Adam are about as large as the rate.
_MIN_RATE = 1e-6

_PAGING = tuple(
    param
    for param in inspect.signature(paged).parameters.values()
    if param.kind is inspect.Parameter.KEYWORD_ONLY
)


def _alias(name: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Builds `paged(optax.X(...))` as one function with one signature."""
    plain = name.removeprefix("paged_").removesuffix("_8bit").removesuffix("_32bit")
    codec = "dynamic_int8" if name.endswith("_8bit") else None
    module = optax if hasattr(optax, plain) else optax.contrib
    source, optimizer = f"{module.__name__}.{plain}", getattr(module, plain)
    original = inspect.signature(optimizer)
    paging = [
        param.replace(default=codec) if param.name == "codec" else param
        for param in _PAGING
    ]
    names = {param.name for param in paging}

    def build(*args: object, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        subset = {key: kwargs.pop(key) for key in names & kwargs.keys()}
        subset.setdefault("codec", codec)
        inner = optimizer(*args, **kwargs)
        if subset.get("master_remainders") == "int8":
            rate = original.bind(*args, **kwargs).arguments.get("learning_rate")
            if isinstance(rate, float) and 0 < rate < _MIN_RATE:
                warn_user(
                    f"learning_rate={rate} with master_remainders='int8': most steps"
                    " are less than half a unit of these masters, and are lost. Use"
                    f" rates of {_MIN_RATE:g} or more, or master_remainders=True."
                )
        return paged(inner, **subset)

    stored, promise = "", "the same numbers, a few pages of moments on the device"
    if codec is not None:
        stored = ", eight bits a value"
        promise = "a quarter of the host memory and of the link's traffic"
    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    build.__doc__ = f"""`{source}`, its moments in host memory{stored}.

    `paged({source}(...))`: {promise}.

    Args:
      ...: The arguments of `{source}`, then `page_size`, `device_budget`, `codec` and
        the others of `paged`.

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
    signature = original.replace(
        parameters=[*original.parameters.values(), *paging],
        return_annotation=optax.GradientTransformationExtraArgs,
    )
    # Functions declare no such attribute, so a plain assignment fails the type check.
    setattr(build, "__signature__", signature)  # noqa: B010
    return build


paged_adamw = _alias("paged_adamw")
paged_adam = _alias("paged_adam")
paged_nadamw = _alias("paged_nadamw")
paged_lion = _alias("paged_lion")
paged_ademamix = _alias("paged_ademamix")
paged_sgd = _alias("paged_sgd")
paged_rmsprop = _alias("paged_rmsprop")
paged_adagrad = _alias("paged_adagrad")
paged_lamb = _alias("paged_lamb")
paged_lars = _alias("paged_lars")
paged_adafactor = _alias("paged_adafactor")
paged_muon = _alias("paged_muon")

paged_adamw_32bit = _alias("paged_adamw_32bit")
paged_lion_32bit = _alias("paged_lion_32bit")
paged_ademamix_32bit = _alias("paged_ademamix_32bit")
paged_adamw_8bit = _alias("paged_adamw_8bit")
paged_lion_8bit = _alias("paged_lion_8bit")
paged_ademamix_8bit = _alias("paged_ademamix_8bit")
