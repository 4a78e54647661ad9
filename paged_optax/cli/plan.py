"""Ways to train a model, the memory each takes, and whether it fits a device."""

import argparse
import functools
from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.sizes import readable_bytes
from paged_optax.backend.text_table import show
from paged_optax.cli import bandwidth
from paged_optax.planning.fits import what_fits
from paged_optax.planning.shapes import checkpoint_shapes, model_shapes, module_shapes
from paged_optax.planning.shapes.decoder import DECODERS

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
    "adafactor": optax.adafactor,
    "muon": optax.contrib.muon,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    model = parser.add_mutually_exclusive_group(required=True)
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
        help="a .safetensors file, a folder of them, or an Orbax checkpoint",
    )
    parser.add_argument(
        "--device-memory", required=True, metavar="BYTES", help="such as 24GiB"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="of --params (default: %(default)s)"
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        choices=_OPTIMIZERS,
        metavar="NAME",
        help=f"{', '.join(_OPTIMIZERS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--codec",
        default="dynamic_int8",
        help="how moments are stored where they are coded (default: %(default)s)",
    )
    parser.add_argument(
        "--master-dtype", help="of a copy of the parameters, such as float32"
    )
    parser.add_argument("--page-size", default="16MiB", help="(default: %(default)s)")
    parser.add_argument(
        "--link",
        default="25",
        metavar="GB/S",
        help="the link's rate in one direction, in 10^9 bytes a second: about 12 for"
        " PCIe 3 x16, 25 for 4, 50 for 5 (default: %(default)s); or 'measured'",
    )
    parser.add_argument(
        "--layers",
        default="layers",
        metavar="KEY",
        help="under which layers are stacked (default: %(default)s)",
    )


def run(given: argparse.Namespace) -> int:
    """Prints the table."""
    if given.device_memory.isdigit() and int(given.device_memory) < 1 << 20:
        raise ValueError(
            f"--device-memory {given.device_memory} would be bytes: give a unit, as in"
            f" {given.device_memory}GiB."
        )
    rate = _rate(given.link)  # First: it needs the accelerator, the rest does not.
    if given.link != "measured":
        # Shapes alone: no accelerator's memory is to be taken for them.
        jax.config.update("jax_platforms", "cpu")
    params = _shapes(given)
    found = what_fits(
        params,
        _OPTIMIZERS[given.optimizer](1e-3),
        device_memory=given.device_memory,
        codec=given.codec,
        master_dtype=given.master_dtype,
        page_size=given.page_size,
        link_gigabytes_per_second=rate,
        layers=given.layers,
    )
    leaves = jax.tree.leaves(params)
    count = sum(x.size for x in leaves)
    dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
    master = f" with a copy in {given.master_dtype}" if given.master_dtype else ""
    print(
        f"{count / 1e9:.3g} billion parameters in {dtypes},"
        f" {readable_bytes(nbytes(params))}; {given.optimizer}{master}\n"
    )
    show(*found.cells())
    print("", *found.notes(), sep="\n")
    return 0


def _shapes(given: argparse.Namespace) -> PyTree[jax.ShapeDtypeStruct]:
    if given.module:
        return module_shapes(given.module)
    if given.checkpoint:
        return checkpoint_shapes(given.checkpoint)
    return model_shapes(given.params, given.dtype)


def _rate(text: str) -> float:
    """The rate of the slower direction, in pages, where it is to be measured."""
    if text != "measured":
        try:
            return float(text)
        except ValueError:
            raise ValueError(
                f"--link {text!r} is neither a rate in GB/s, such as 25, nor"
                " 'measured'."
            ) from None
    rates = [r for r in bandwidth.measure(bandwidth.SIZE, 3) if r.directions == 1]
    for rate in rates:
        if rate.reason:
            raise ValueError(f"--link measured: {rate.reason}; pass a rate in GB/s.")
    return min(rate.median for rate in rates if "pages" in rate.name)
