"""Ways to train a model, the memory of each, and what fits."""

import argparse
import dataclasses
import difflib
import functools
import pathlib
import re
import shlex
import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree

import paged_optax
from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import parse_bytes, print_table, readable_bytes
from paged_optax.backend.validation import floating_dtype
from paged_optax.cli.machine import measured_card
from paged_optax.engine.pages import DEFAULT_PAGE_SIZE
from paged_optax.planning.card_rates import CARDS, find_card, machine_rate
from paged_optax.planning.checkpoint import checkpoint_shapes
from paged_optax.planning.fits import RATE, what_fits
from paged_optax.planning.footprints import Footprints, wrap_text
from paged_optax.planning.hugging_face import config_heads, decoder_fields
from paged_optax.planning.models import (
    DECODERS,
    decoder_of,
    model_shapes,
    module_shapes,
)

# The name of the card of this machine.
_MEASURED = "measured"
# What `examples/finetune_hf.py` trains, with an optimizer of its own.
_TRAINED = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
#: What follows the program's name.
EXAMPLE = "plan --params 8B --device-memory 24GiB"

_OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "nadamw": optax.nadamw,
    "ademamix": optax.contrib.ademamix,
    "lion": optax.lion,
    "sgd": functools.partial(optax.sgd, momentum=0.9),
    "rmsprop": optax.rmsprop,
    "adagrad": optax.adagrad,
    "lamb": optax.lamb,
    "lars": optax.lars,
    "adafactor": optax.adafactor,
    "muon": optax.contrib.muon,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    _add_models(parser)
    parser.add_argument(
        "--device-memory",
        metavar="BYTES",
        help="such as 24GiB (default: the card's; one of both is needed)",
    )
    parser.add_argument(
        "--card",
        metavar="NAME",
        help=f"one of {', '.join(CARDS)}, or 'measured', which is this machine's: the"
        " default of --device-memory, --link and --teraflops",
    )
    _add_batch(parser)
    parser.add_argument(
        "--dtype",
        help="of the parameters (default: bfloat16, or what the model itself has)",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="NAME",
        help=f"{', '.join(_OPTIMIZERS)}, or an alias such as paged_adamw_8bit"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--codec",
        help="how moments are stored, such as dynamic_int8 (default: as Optax has"
        " them, as in paged)",
    )
    parser.add_argument(
        "--master-dtype",
        metavar="DTYPE",
        help="of a copy of the parameters, such as float32",
    )
    parser.add_argument(
        "--master-remainders",
        action="store_true",
        help="of a float32 copy, what bfloat16 parameters lack: 2 bytes each",
    )
    parser.add_argument(
        "--page-size",
        default=DEFAULT_PAGE_SIZE,
        metavar="BYTES",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--link",
        metavar="GB/S",
        help="the link's rate in one direction, in 10^9 bytes a second: about 12 for"
        " PCIe 3 x16, 25 for 4, 50 for 5 (default: the card's, or 25)",
    )
    parser.add_argument(
        "--teraflops",
        metavar="TFLOP/S",
        help="that training reaches: says from how many tokens a step the link is free"
        " (default: 30%% to 60%% of the card's)",
    )
    parser.add_argument(
        "--layers",
        default="layers",
        metavar="KEY",
        help="under which layers are stacked (default: %(default)s)",
    )


def _add_batch(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that state a step's batch."""
    group = parser.add_argument_group("activations, and the way to choose")
    whole = functools.partial(group.add_argument, type=int, metavar="N")
    whole("--batch", help="sequences of a step")
    whole("--length", help="tokens of a sequence")
    whole("--heads", help="heads of attention (default: the model's, if it says them)")
    whole(
        "--score-blocks",
        default=1,
        help="blocks of queries whose scores are computed one by one (default: 1)",
    )
    group.add_argument(
        "--fused-head",
        action="store_true",
        help="the loss takes linear_cross_entropy, and holds no logits",
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that name a model."""
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


def run(options: argparse.Namespace) -> int:
    """Prints the tables."""
    rate = options.link
    if rate is not None:
        rate = _positive("--link", rate, "GB/s, such as 25")
    memory = _memory(options)
    optimizer, codec = _optimizer(options.optimizer)
    master = options.master_dtype
    if master is not None:
        master = floating_dtype("--master-dtype", master)
    products = options.teraflops
    if products is not None:
        products = _positive("--teraflops", products, "TFLOP/s, such as 600")
    card = options.card
    if card == _MEASURED:
        card = measured_card()
    else:
        # Only shapes are needed, and JAX would take most of an accelerator's memory.
        jax.config.update("jax_platforms", "cpu")
    params, left_out = _shapes(options)
    footprints = _fits(
        params,
        _OPTIMIZERS[optimizer](float(RATE)),
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
    footprints = dataclasses.replace(footprints, inner=_code(optimizer))
    leaves = jax.tree.leaves(params)
    count = sum(x.size for x in leaves)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    copy = f" with a copy in {master}" if master else ""
    if options.master_remainders:
        copy = " with the remainders of a copy in float32"
    print(
        f"{count:,} parameters in {dtypes}, {readable_bytes(nbytes(params))};"
        f" {optimizer}{copy}\n"
    )
    for titles, rows in footprints.tables():
        print_table(titles, rows)
        print()
    print(footprints.notes())
    for note in left_out:
        print(wrap_text(note))
    if advice := footprints.advice():
        print(f"\n{advice}")
        try:
            if command := _command(options):
                print(f"\nOr all of it, with a rate and masters of its own:\n{command}")
        except ValueError as error:  # the tables need no config.json
            print(f"\n{wrap_text(f'No example trains it: {error}')}")
    return 0


def _fits(*args: Any, **kwargs: Any) -> Footprints:
    """What fits; an error names the options of the command line."""
    try:
        return what_fits(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(_with_options(str(error))) from error


def _with_options(message: str) -> str:
    """A message of `what_fits` for people who write options, and no Python."""
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
    """The command that fine-tunes a Hugging Face folder; empty if there is none."""
    folder = pathlib.Path(options.checkpoint or "")
    config = decoder_fields(folder) if options.checkpoint else None
    if config is None or not folder.is_dir():
        return ""
    # The example has one optimizer, keeps the dtype, and takes no longer sequences than
    # the model knows.
    chosen = options.optimizer != "adamw" or options.dtype or options.codec
    longest = config.number("max_position_embeddings", options.length)
    kind = config.entries.get("model_type")
    if kind not in _TRAINED or chosen or options.length > longest:
        return ""
    memory = ["--device-memory", options.device_memory] * bool(options.device_memory)
    sizes = ["--batch", options.batch, "--length", options.length, *memory]
    paths = ["--checkpoint", folder, "--text", "mine.txt", "--output", "mine"]
    program = "python", "examples/finetune_hf.py"
    return shlex.join(map(str, [*program, *paths, *sizes]))


def _memory(options: argparse.Namespace) -> int | None:
    """Bytes of the device's memory; None: the card's."""
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
    """Heads of attention: as stated, or by the model's name or its `config.json`."""
    if options.heads is not None or options.batch is None:
        return options.heads
    if options.params is not None:
        return decoder_of(options.params).heads
    if options.checkpoint is not None:
        return config_heads(pathlib.Path(options.checkpoint))
    return None


def _code(optimizer: str) -> str:
    """The transformation of a name, as code."""
    make = _OPTIMIZERS[optimizer]
    if isinstance(make, functools.partial):
        return f"optax.sgd({RATE}, momentum=0.9)"
    place = "optax.contrib" if ".contrib." in make.__module__ else "optax"
    return f"{place}.{make.__name__}({RATE})"


def _optimizer(name: str) -> tuple[str, str | None]:
    """An optimizer's name in `_OPTIMIZERS`, and the codec that the name implies."""
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
    """The shapes of the model, and the warnings about them."""
    dtype = options.dtype
    if dtype is not None:
        dtype = floating_dtype("--dtype", dtype)
    if options.params is not None:
        return model_shapes(options.params, dtype or "bfloat16"), []
    read = module_shapes if options.module is not None else checkpoint_shapes
    # A warning, such as of experts that are not counted, is printed with the tables.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        shapes = read(options.checkpoint if options.module is None else options.module)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), shapes
    ), [str(warning.message) for warning in warned]


def _positive(option: str, text: str, unit: str) -> float:
    """Reads a positive number; the unit, with an example, is for the message."""
    try:
        return machine_rate(option, float(text))
    except ValueError as error:
        raise ValueError(f"{option} {text!r} is no rate in {unit}.") from error
