"""Memory of ways to train a model, and the ways that fit a device."""

import argparse
import dataclasses
import pathlib
import warnings

import jax
import optax
from jaxtyping import PyTree

import paged_optax
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import readable_bytes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.backend.validation import floating_dtype
from paged_optax.planning.cards import CARDS
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

_OPTIMIZERS = (
    "adamw adam nadamw ademamix lion sgd rmsprop adagrad lamb lars adafactor muon"
).split()

# The option and the value's name, and the help.
_MODELS = {
    "--params SIZE": "a decoder in the proportions of Llama 3 with this many"
    f" parameters, such as 8B; or one of {', '.join(DECODERS)}",
    "--module PACKAGE.MODULE:FUNCTION": "a function that makes a Flax NNX module, a"
    " Linen module and its inputs, or parameters",
    "--checkpoint PATH": "a .safetensors file; config.json of Hugging Face; a folder"
    " with either; an Orbax checkpoint",
}
_OPTIONS = {
    "--device-memory BYTES": "such as 24GiB (default: the card's; one of both is"
    " needed)",
    "--card NAME": f"one of {', '.join(CARDS)}: the default of --device-memory, --link"
    " and --teraflops",
    "--host-memory BYTES": "such as 12GiB: counted too (default: not counted)",
    "--dtype DTYPE": "of the parameters (default: bfloat16, or the model's)",
    "--codec NAME": "of the moments, such as dynamic_int8 (default: none)",
    "--master-dtype DTYPE": "of master weights, such as float32",
}
_RATES = {
    "--link": "link rate in one direction, in 10^9 bytes a second: about 12 for PCIe 3"
    " x16, 25 for 4, 50 for 5 (default: the card's, or 25)",
    "--teraflops": "rate of products in training: says from how many tokens a step the"
    " link is free (default: 30%% to 60%% of the card's)",
}
_COUNTS = {
    "--devices": "devices of one machine that divide the model (default: 1)",
    "--rank": "rows of an adapter, in the rows of LoRA and QLoRA (default: 16)",
    "--batch": "sequences of a step",
    "--length": "tokens of a sequence",
    "--heads": "attention heads (default: the model's)",
}
_FLAGS = {
    "--fused-head": "the loss uses linear_cross_entropy, without logits",
    "--unified-memory": "device and host are one memory, whose bytes add up",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model = parser.add_argument_group("the model: one of")
    model = model.add_mutually_exclusive_group(required=True)
    for group, args in ((model, _MODELS), (parser, _OPTIONS)):
        for name, text in args.items():
            option, metavar = name.split()
            group.add_argument(option, metavar=metavar, help=text)
    aliases = [x for x in paged_optax.__all__ if x.startswith("paged_")]
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        choices=[*_OPTIMIZERS, *aliases],
        help=f"{', '.join(_OPTIMIZERS)}, or an alias such as paged_adamw_8bit",
    )
    for kind, metavar, args in ((float, "RATE", _RATES), (int, "N", _COUNTS)):
        for name, text in args.items():
            parser.add_argument(name, metavar=metavar, type=kind, help=text)
    parser.set_defaults(devices=1, rank=16)
    parser.add_argument(
        "--master-remainders",
        nargs="?",
        const=True,
        default=False,
        metavar="int8",
        help="master weights as remainders of bfloat16: 2 bytes each, 1 in int8",
    )
    for name, text in _FLAGS.items():
        parser.add_argument(name, action="store_true", help=text)


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
    footprints = what_fits(
        params,
        getattr(module, optimizer)(float(RATE), **momentum),
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        devices=options.devices,
        rank=options.rank,
        card=options.card,
        batch=options.batch,
        length=options.length,
        codec=options.codec or ("dynamic_int8" if bits == "8bit" else None),
        master_dtype=options.master_dtype,
        master_remainders=options.master_remainders,
        link_gigabytes_per_second=options.link,
        teraflops=options.teraflops,
        heads=_heads(options),
        fused_head=options.fused_head,
        unified_memory=options.unified_memory or None,
    )
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


def _heads(options: argparse.Namespace) -> int | None:
    """Attention heads: stated, or of the model's name or `config.json`."""
    if options.heads is not None or options.batch is None:
        return options.heads
    if options.params is not None:
        return find_decoder(options.params).heads
    if options.checkpoint is not None:
        return config_heads(pathlib.Path(options.checkpoint))
    return None


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
