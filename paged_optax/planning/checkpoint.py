"""Shapes of the parameters in a checkpoint; no array is read."""

import functools
import math
import pathlib
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import path_name
from paged_optax.backend.types import KeyPath
from paged_optax.backend.user_warnings import warn_user
from paged_optax.planning.hugging_face import MOST_BYTES, Fields, config_shapes

#: JAX's dtypes by safetensors' names; None: no floating point. From
#: https://docs.rs/safetensors/latest/safetensors/tensor.
_DTYPES: dict[str, str | None] = {
    "F4": "float4_e2m1fn",
    "F6_E2M3": "float6_e2m3fn",
    "F6_E3M2": "float6_e3m2fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
} | dict.fromkeys(["BOOL", *(f"{x}{n}" for x in "IU" for n in (8, 16, 32, 64))])
#: Tensors of one model.
MOST_TENSORS = 100_000


def checkpoint_shapes(path: str | pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the floating point arrays in a checkpoint.

    Reads a `.safetensors` file, of which the header is enough; Hugging Face's
    `model.safetensors.index.json` or `config.json`, with or without weights; a folder
    with any of these; or an Orbax checkpoint, and its `"params"` if it has them. The
    files are untrusted: they are read within bounds, and nothing in them runs. Raises
    `ValueError` with the file and the field.
    """
    name, path = str(path), pathlib.Path(path)
    if not name or not path.exists():
        raise ValueError(f"checkpoint {name!r} does not exist.")
    shapes = _read(path)
    if not jax.tree.leaves(shapes):
        raise ValueError(f"checkpoint {name!r} has no floating point arrays.")
    return shapes


def _read(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    if path.is_dir():
        # An index names the files of the model, which may be missing.
        if files := sorted(path.glob("*.safetensors.index.json")):
            return _index(files[0])
        if files := sorted(path.glob("*.safetensors")):
            return _headers(files)
        config = path / "config.json"
        return config_shapes(config) if config.exists() else _orbax(path)
    if path.name.endswith(".index.json"):
        return _index(path)
    return config_shapes(path) if path.suffix == ".json" else _headers([path])


def _index(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    fields = Fields.of_file(path)
    names = fields.mapping("weight_map", fields.entries.get("weight_map")).values()
    for name in names or [None]:
        # Files of the same folder only: an index must not choose others.
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise fields.wrong("weight_map", name, "the name of a .safetensors file")
    files = [path.with_name(str(name)) for name in dict.fromkeys(names)]
    if all(file.exists() for file in files):
        return _headers(files)
    config = path.with_name("config.json")
    if not config.exists():
        raise ValueError(
            f"{str(path)!r} names tensors and no shapes: put config.json beside it, or"
            " the .safetensors files, of which the header is enough."
        )
    shapes = config_shapes(config)
    metadata = fields.mapping("metadata", fields.entries.get("metadata", {}))
    counted = nbytes(shapes)
    size = metadata.get("total_size", counted)
    if not isinstance(size, int | float) or not 0.99 * counted < size < 1.01 * counted:
        wanted = f"the {counted} bytes of {str(config)!r}, within 1%"
        raise fields.wrong("metadata.total_size", size, wanted)
    return shapes


def _headers(paths: Sequence[pathlib.Path]) -> dict[str, jax.ShapeDtypeStruct]:
    tensors: dict[str, jax.ShapeDtypeStruct] = {}
    packed = 0
    for path in paths:
        fields = _header(path)
        for name, value in fields.entries.items():
            shape, dtype, size = _tensor(fields, name, value)
            if inexact := _DTYPES[dtype]:
                tensors[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(inexact))
            elif dtype not in ("BOOL", "I64", "U64"):
                packed += size
        if len(tensors) > MOST_TENSORS:
            raise ValueError(f"{str(path)!r}: more than {MOST_TENSORS} tensors.")
    if packed > nbytes(tensors) / 5:  # fewer may be masks
        warn_user(
            f"{str(paths[0].parent)!r}: {packed} bytes of whole numbers, as quantized"
            f" weights are, are left out; the {nbytes(tensors)} bytes of floating point"
            " are counted."
        )
    return tensors


def _header(path: pathlib.Path) -> Fields:
    """Reads the header of a safetensors file: eight bytes of length, then JSON.

    safetensors' own reader refuses a header without its arrays. The format:
    https://github.com/huggingface/safetensors#format.
    """
    if not path.is_file():  # a pipe or a device may never end
        raise ValueError(f"checkpoint {str(path)!r} is neither a file nor a folder.")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MOST_BYTES, path.stat().st_size - 8):
            raise ValueError(
                f"{str(path)!r} is no safetensors file: its header would have {length}"
                " bytes."
            )
        fields = Fields(path, file.read(length))
    fields.entries.pop("__metadata__", None)
    return fields


def _tensor(
    fields: Fields, name: str, value: object
) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype and bytes of one tensor."""
    match value:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [first, last]}:
            sizes = *shape, first, last
            valid = dtype in _DTYPES and all(type(n) is int and n >= 0 for n in sizes)
            # No machine holds 2^50 values.
            if valid and len(shape) <= 32 and math.prod(shape) <= 1 << 50:
                return tuple(shape), dtype, last - first
        case _:
            pass
    raise fields.wrong(name, value, "dtype, shape and data_offsets of a tensor")


def _orbax(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ValueError(
            f"checkpoint {str(path)!r} has no .safetensors file; to read Orbax's,"
            " install orbax-checkpoint."
        ) from error
    tree = None
    if any(path.glob("*_METADATA")):  # Orbax warns without it.
        for file in path.glob("*_METADATA"):
            Fields.of_file(file)  # Orbax reads it without bounds.
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                metadata = checkpointer.metadata(path.resolve())
        except Exception as error:  # Orbax has no error type of its own.
            reason = f"{type(error).__name__}: {error}"[:300]
            raise ValueError(
                f"checkpoint {str(path)!r}: Orbax cannot read its metadata ({reason})."
            ) from error
        tree = getattr(metadata, "item_metadata", metadata)
        tree = getattr(tree, "tree", tree)
    if isinstance(tree, dict):
        tree = tree.get("params", tree)
    if tree is None:
        raise ValueError(
            f"{str(path)!r} has no .safetensors file, no index of such, no config.json,"
            " and is no Orbax checkpoint of arrays: pass the folder that a checkpointer"
            " saved to (of a CheckpointManager, such as 100/default)."
        )
    return jax.tree_util.tree_map_with_path(functools.partial(_shape, path), tree)


def _shape(
    folder: pathlib.Path, path: KeyPath, x: PyTree
) -> jax.ShapeDtypeStruct | None:
    try:
        dtype, shape = jnp.dtype(x.dtype), tuple(x.shape)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"checkpoint {str(folder)!r}: field {path_name(path)!r} is no array:"
            f" {error}."
        ) from error
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jax.ShapeDtypeStruct(shape, dtype) if inexact else None
