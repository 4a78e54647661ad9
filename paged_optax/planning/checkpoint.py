"""Shapes of the parameters in a checkpoint; no array is read."""

import math
import pathlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.user_warnings import warn_user
from paged_optax.planning.hugging_face import Fields, config_shapes
from paged_optax.planning.models import TEXT_ONLY

#: JAX's dtypes by safetensors' names. From
#: https://docs.rs/safetensors/latest/safetensors/tensor.
_DTYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
# Parts of a model beside its decoder, in files of the hub and of transformers.
_PICTURES = re.compile(r"(model[.])?(vision_tower|multi_modal_projector)[.]")


def checkpoint_shapes(path: str | pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the floating point arrays in a checkpoint.

    Reads a `.safetensors` file, of which the header is enough; Hugging Face's
    `config.json`; a folder with either; or an Orbax checkpoint, and its `"params"` if
    it has them. The files are untrusted: they are read within bounds, and nothing in
    them runs. Raises `ValueError` with the file and the field.
    """
    path = pathlib.Path(path)
    if path.suffix == ".json":
        return config_shapes(path)
    files = [path]
    if path.is_dir():
        # Some repositories hold their model twice, as `consolidated.safetensors` too.
        names = ("model*.safetensors", "*.safetensors")
        files = next(filter(None, (sorted(path.glob(name)) for name in names)), [])
    config = path / "config.json"
    if files:
        shapes = _headers(files)
    else:
        shapes = config_shapes(config) if config.exists() else _orbax(path)
    if not jax.tree.leaves(shapes):
        raise ValueError(f"checkpoint {str(path)!r} has no floating point arrays.")
    return shapes


def _headers(paths: Sequence[pathlib.Path]) -> dict[str, jax.ShapeDtypeStruct]:
    # safetensors' own reader refuses a header without its arrays. The format:
    # https://github.com/huggingface/safetensors#format.
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    packed = 0
    for path in paths:
        header = Fields(path, header=True)
        header.entries.pop("__metadata__", None)
        for name, tensor in header.entries.items():
            match tensor:
                case {"dtype": str(dtype), "shape": [*shape]} if all(
                    type(n) is int and n >= 0 for n in shape
                ):
                    pass
                case _:
                    raise header.wrong(name, "dtype and shape of a tensor")
            bits = re.match(r"[A-Z]+(\d+)", dtype)
            if dtype in _DTYPES:
                floating = jnp.dtype(_DTYPES[dtype])
                shapes[name] = jax.ShapeDtypeStruct(tuple(shape), floating)
            elif bits and dtype not in ("I64", "U64"):
                packed += int(bits[1]) * math.prod(shape) // 8
    if remaining := [x for x in shapes if _PICTURES.match(x)]:
        size = nbytes([shapes.pop(x) for x in remaining])
        warn_user(f"{str(paths[0].parent)!r}: {size} bytes of {TEXT_ONLY}")
    if packed > nbytes(shapes) / 5:  # fewer may be masks
        warn_user(
            f"{str(paths[0].parent)!r}: {packed} bytes of whole numbers, as quantized"
            f" weights are, are left out; the {nbytes(shapes)} bytes of floating point"
            " are counted."
        )
    return shapes


def _orbax(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    files = sorted(path.glob("*_METADATA"))
    if not files:
        raise ValueError(
            f"checkpoint {str(path)!r} has no .safetensors file, no config.json, and is"
            " no Orbax checkpoint: pass the folder that a checkpointer saved to (of a"
            " CheckpointManager, such as 100/default)."
        )
    for file in files:
        Fields(file)  # Orbax reads it without bounds.
    try:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.resolve())
        tree = getattr(metadata, "item_metadata", metadata)
        tree = getattr(tree, "tree", tree)
        tree = tree.get("params", tree) if isinstance(tree, dict) else tree
        types = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(x.dtype)), tree
        )
    except Exception as error:  # Orbax has no error type of its own.
        raise ValueError(
            f"checkpoint {str(path)!r}: Orbax cannot read its metadata"
            f" ({type(error).__name__}: {str(error)[:300]})."
        ) from error
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x if floating(x) else None, types)
