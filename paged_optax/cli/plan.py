"""Memory of ways to train a model, and the ways that fit a device."""

import argparse
import dataclasses
import inspect
import pathlib
import re
import typing
import warnings
from typing import Any

import jax
import optax
from jaxtyping import PyTree

import paged_optax
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import readable_bytes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import floating_dtype
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.hugging_face import config_heads
from paged_optax.planning.models import (
    DECODERS,
    TEXT_ONLY,
    find_decoder,
    model_shapes,
    module_shapes,
)
from paged_optax.planning.what_fits import RATE, what_fits

_ALIASES = [x for x in paged_optax.__all__ if x.startswith("paged_")]
_OPTIMIZERS = [*dict.fromkeys(x.split("_")[1] for x in _ALIASES)]

#: The keyword arguments of `what_fits`, which are options.
_ARGUMENTS = {
    name: parameter
    for name, parameter in inspect.signature(what_fits).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments: the model, the optimizer, and those of `what_fits`."""
    model = parser.add_argument_group("the model: one of")
    model = model.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--params",
        metavar="SIZE",
        help="a decoder in the proportions of Llama 3 with this many parameters, such"
        f" as 8B; or one of {', '.join(DECODERS)}",
    )
    model.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function that makes a Flax NNX module, a Linen module and its inputs,"
        " or parameters",
    )
    model.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="a .safetensors file; config.json of Hugging Face; a folder with either;"
        " an Orbax checkpoint",
    )
    parser.add_argument(
        "--dtype", help="of the parameters (default: bfloat16, or the model's)"
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        choices=[*_OPTIMIZERS, *_ALIASES],
        help=f"{', '.join(_OPTIMIZERS)}, or an alias such as paged_adamw_8bit",
    )
    text = inspect.getdoc(what_fits) or ""  # none with `python -OO`
    documented = dict(re.findall(r"^  (\w+): (.+(?:\n    .+)*)", text, re.MULTILINE))
    plain = str.maketrans({"%": "%%", "`": ""})
    for name, parameter in _ARGUMENTS.items():
        kinds = {parameter.annotation, *typing.get_args(parameter.annotation)}
        kind = next(x for x in (str, float, int, bool) if x in kinds)
        option: dict[str, Any] = {"metavar": name.upper(), "type": kind}
        if kind is bool:
            option = {"action": "store_const", "const": True}
        elif bool in kinds:
            option |= {"nargs": "?", "const": True}
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=parameter.default,
            help=documented.get(name, "").translate(plain).replace("None:", "default:"),
            **option,
        )
    parser.set_defaults(rank=16)


def run(options: argparse.Namespace) -> int:
    """Prints the tables, their notes and the way to choose."""
    # Only shapes are needed, and JAX would allocate most of an accelerator.
    jax.config.update("jax_platforms", "cpu")
    optimizer, _, bits = options.optimizer.removeprefix("paged_").partition("_")
    module = optax if hasattr(optax, optimizer) else optax.contrib
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    if options.device_memory is None and options.card is None:
        raise ValueError("neither --device-memory is given, nor --card: give one.")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        params = _shapes(options)
    arguments = {name: getattr(options, name) for name in _ARGUMENTS}
    if bits == "8bit" and options.codec is None:
        arguments["codec"] = "dynamic_int8"
    if options.heads is None and options.batch is not None:
        if options.params is not None:
            arguments["heads"] = find_decoder(options.params).heads
        elif options.checkpoint is not None:
            arguments["heads"] = config_heads(pathlib.Path(options.checkpoint))
    inner = getattr(module, optimizer)(float(RATE), **momentum)
    footprints = what_fits(params, inner, **arguments)
    momentum = ", momentum=0.9" if momentum else ""
    footprints = dataclasses.replace(
        footprints,
        inner=f"{module.__name__}.{optimizer}({RATE}{momentum})",
        remarks=(*footprints.remarks, *(str(x.message) for x in warned)),
    )
    leaves = jax.tree.leaves(params)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    copy = f" with a copy in {options.master_dtype}" if options.master_dtype else ""
    if options.master_remainders:
        copy = " with the remainders of a copy in float32"
    print(
        f"{sum(x.size for x in leaves):,} parameters in {dtypes},"
        f" {readable_bytes(nbytes(params))}; {optimizer}{copy}\n\n{footprints}"
    )
    return 0


def _shapes(options: argparse.Namespace) -> PyTree[jax.ShapeDtypeStruct]:
    dtype = options.dtype and floating_dtype("--dtype", options.dtype)
    if options.params is not None:
        beside_vision = [x for name, x in DECODERS.items() if name.endswith("text")]
        if find_decoder(options.params) in beside_vision:
            warn_user(f"{options.params}: {TEXT_ONLY}")
        return model_shapes(options.params, dtype or "bfloat16")
    if options.module is not None:
        shapes = module_shapes(options.module)
    else:
        shapes = checkpoint_shapes(options.checkpoint)
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    return jax.tree.map(cast, shapes)
