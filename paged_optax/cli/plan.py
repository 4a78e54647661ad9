"""Memory of ways to train a model, and the ways that fit a device."""

import argparse
import dataclasses
import difflib
import functools
import pathlib
import re
import shlex
import warnings

import jax
import optax
from jaxtyping import PyTree

import paged_optax
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import parse_bytes, print_table, readable_bytes
from paged_optax.backend.validation import floating_dtype
from paged_optax.cli.machine import measured_card
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.planning.cards import CARDS, find_card, machine_rate
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.footprints import wrap_text
from paged_optax.planning.hugging_face import config_heads, decoder_fields
from paged_optax.planning.models import (
    DECODERS,
    decoder_of,
    model_shapes,
    module_shapes,
)
from paged_optax.planning.what_fits import RATE, what_fits

# Name of this machine's card.
_MEASURED = "measured"
# Models of `examples/finetune_hf`.
_TRAINED = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
#: Command line after the program's name.
EXAMPLE = "plan --params 8B --device-memory 24GiB"

_OPTIMIZERS = (
    "adamw adam nadamw ademamix lion sgd rmsprop adagrad lamb lars adafactor muon"
).split()

# Options with a value: the value's name, and the help.
_OPTIONS = {
    "--device-memory": (
        "BYTES",
        "such as 24GiB (default: the card's; one of both is needed)",
    ),
    "--card": (
        "NAME",
        f"one of {', '.join(CARDS)}, or 'measured' for this machine's: the default of"
        " --device-memory, --link and --teraflops",
    ),
    "--dtype": ("DTYPE", "of the parameters (default: bfloat16, or the model's)"),
    "--optimizer": (
        "NAME",
        f"{', '.join(_OPTIMIZERS)}, or an alias such as paged_adamw_8bit (default:"
        " %(default)s)",
    ),
    "--codec": ("NAME", "of the moments, such as dynamic_int8 (default: none)"),
    "--master-dtype": ("DTYPE", "of master weights, such as float32"),
    "--page-size": ("BYTES", "(default: %(default)s)"),
    "--link": (
        "GB/S",
        "link rate in one direction, in 10^9 bytes a second: about 12 for PCIe 3 x16,"
        " 25 for 4, 50 for 5 (default: the card's, or 25)",
    ),
    "--teraflops": (
        "TFLOP/S",
        "rate of products in training: says from how many tokens a step the link is"
        " free (default: 30%% to 60%% of the card's)",
    ),
    "--layers": ("KEY", "of the stacked layers (default: %(default)s)"),
}
_DEFAULTS = {"optimizer": "adamw", "page_size": DEFAULT_PAGE_SIZE, "layers": "layers"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    models = parser.add_argument_group("the model: one of")
    model = models.add_mutually_exclusive_group(required=True)
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
        help="a .safetensors file; config.json or model.safetensors.index.json of"
        " Hugging Face, also without weights; a folder with these; an Orbax checkpoint",
    )
    for name, (metavar, text) in _OPTIONS.items():
        parser.add_argument(name, metavar=metavar, help=text)
    parser.set_defaults(**_DEFAULTS)
    parser.add_argument(
        "--master-remainders",
        action="store_true",
        help="master weights in float32 as remainders of bfloat16: 2 bytes each",
    )
    group = parser.add_argument_group("activations, and the way to choose")
    count = functools.partial(group.add_argument, type=int, metavar="N")
    count("--batch", help="sequences of a step")
    count("--length", help="tokens of a sequence")
    count("--heads", help="attention heads (default: the model's)")
    count(
        "--score-blocks",
        default=1,
        help="blocks of queries whose scores are computed sequentially (default: 1)",
    )
    group.add_argument(
        "--fused-head",
        action="store_true",
        help="the loss uses linear_cross_entropy, without logits",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the tables, their notes and the way to choose."""
    rate, products = options.link, options.teraflops
    if rate is not None:
        rate = _positive("--link", rate, "GB/s, such as 25")
    if products is not None:
        products = _positive("--teraflops", products, "TFLOP/s, such as 600")
    memory = _memory(options)
    optimizer, codec = _optimizer(options.optimizer)
    master = options.master_dtype and floating_dtype(
        "--master-dtype", options.master_dtype
    )
    if options.card == _MEASURED:
        card = measured_card()
    else:
        card = options.card
        # Only shapes are needed, and JAX would allocate most of an accelerator.
        jax.config.update("jax_platforms", "cpu")
    params, warned = _shapes(options)
    try:
        footprints = what_fits(
            params,
            _transformation(optimizer),
            device_memory=memory,
            card=card,
            batch=options.batch,
            length=options.length,
            codec=options.codec or codec,
            master_dtype=master,
            master_remainders=options.master_remainders,
            page_size=parse_bytes("--page-size", options.page_size),
            link_gigabytes_per_second=rate,
            teraflops=products,
            layers=options.layers,
            heads=_heads(options),
            score_blocks=options.score_blocks,
            fused_head=options.fused_head,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(_with_options(str(error))) from error
    footprints = dataclasses.replace(footprints, inner=_code(optimizer))
    leaves = jax.tree.leaves(params)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    copy = f" with a copy in {master}" if master else ""
    if options.master_remainders:
        copy = " with the remainders of a copy in float32"
    print(
        f"{sum(x.size for x in leaves):,} parameters in {dtypes},"
        f" {readable_bytes(nbytes(params))}; {optimizer}{copy}\n"
    )
    for titles, rows in footprints.tables():
        print_table(titles, rows)
        print()
    print(footprints.notes())
    for note in warned:
        print(wrap_text(note))
    if advice := footprints.advice():
        print(f"\n{advice}")
        try:
            if command := _command(options):
                print(f"\nOr all of it, with a rate and masters of its own:\n{command}")
        except ValueError as error:  # the tables need no config.json
            print(f"\n{wrap_text(f'No example trains it: {error}')}")
    return 0


def _with_options(message: str) -> str:
    """Names the command's options in a message of `what_fits`."""
    message = message.replace("link_gigabytes_per_second=", "link=")
    message = message.replace(
        ", or an object with the methods of paged_optax.codecs.Codec", ""
    )
    message = re.sub(r"^codec (?=')", "--codec=", message)
    names = "batch|length|heads|score_blocks|fused_head|page_size|codec|link|teraflops"
    names += "|device_memory|master_dtype|master_remainders|layers"
    option = lambda match: "--" + match[1].replace("_", "-") + match[2]
    return re.sub(rf"\b({names})(=)", option, message).replace("=True", "")


def _command(options: argparse.Namespace) -> str:
    """The command that fine-tunes a Hugging Face folder; empty without an example."""
    folder = pathlib.Path(options.checkpoint or "")
    config = decoder_fields(folder) if options.checkpoint else None
    if config is None or not folder.is_dir():
        return ""
    # The example has one optimizer, the model's dtype, and its longest sequences.
    chosen = options.optimizer != "adamw" or options.dtype or options.codec
    longest = config.number("max_position_embeddings", options.length)
    kind = config.entries.get("model_type")
    if kind not in _TRAINED or chosen or options.length > longest:
        return ""
    memory = ["--device-memory", options.device_memory] * bool(options.device_memory)
    sizes = ["--batch", options.batch, "--length", options.length, *memory]
    paths = ["--checkpoint", folder, "--text", "mine.txt", "--output", "mine"]
    program = "python", "examples/finetune_hf"
    return shlex.join(map(str, [*program, *paths, *sizes]))


def _memory(options: argparse.Namespace) -> int | None:
    """Device memory in bytes; None: the card's."""
    if options.device_memory is None:
        if options.card is None:
            raise ValueError("neither --device-memory is given, nor --card: give one.")
        if options.card != _MEASURED:
            find_card(options.card, "--card")
        return None
    memory = parse_bytes("--device-memory", options.device_memory)
    if memory < 1 << 20:
        raise ValueError(
            f"--device-memory {options.device_memory} is {memory} bytes: give the"
            " device's memory with its unit, such as 24GiB."
        )
    return memory


def _heads(options: argparse.Namespace) -> int | None:
    """Attention heads: stated, or of the model's name or `config.json`."""
    if options.heads is not None or options.batch is None:
        return options.heads
    if options.params is not None:
        return decoder_of(options.params).heads
    if options.checkpoint is not None:
        return config_heads(pathlib.Path(options.checkpoint))
    return None


def _transformation(optimizer: str) -> optax.GradientTransformation:
    module = optax if hasattr(optax, optimizer) else optax.contrib
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    return getattr(module, optimizer)(float(RATE), **momentum)


def _code(optimizer: str) -> str:
    """The same as code."""
    module = "optax" if hasattr(optax, optimizer) else "optax.contrib"
    return f"{module}.{optimizer}({RATE}{', momentum=0.9' * (optimizer == 'sgd')})"


def _optimizer(name: str) -> tuple[str, str | None]:
    """Key in `_OPTIMIZERS`, and codec of an optimizer's name."""
    known = name.lower().removeprefix("paged_").removesuffix("_32bit")
    codec = "dynamic_int8" if known.endswith("_8bit") else None
    known = known.removesuffix("_8bit")
    if known not in _OPTIMIZERS:
        aliases = [x for x in paged_optax.__all__ if x.startswith("paged_")]
        close = difflib.get_close_matches(name.lower(), [*_OPTIMIZERS, *aliases], n=2)
        guess = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"--optimizer {name!r} is unknown: use one of {', '.join(_OPTIMIZERS)}, or"
            f" an alias, {', '.join(aliases)}.{guess}"
        )
    return known, codec


def _shapes(
    options: argparse.Namespace,
) -> tuple[PyTree[jax.ShapeDtypeStruct], list[str]]:
    """Shapes of the model, and warnings about them."""
    dtype = options.dtype
    if dtype is not None:
        dtype = floating_dtype("--dtype", dtype)
    if options.params is not None:
        return model_shapes(options.params, dtype or "bfloat16"), []
    read = module_shapes if options.module is not None else checkpoint_shapes
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        shapes = read(options.checkpoint if options.module is None else options.module)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), shapes
    ), [str(warning.message) for warning in warned]


def _positive(option: str, text: str, unit: str) -> float:
    try:
        return machine_rate(option, float(text))
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is no rate in {unit}.") from error
