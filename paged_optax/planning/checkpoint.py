"""Shapes of the parameters in a checkpoint, of which no array is read."""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from paged_optax.backend.memory import nbytes
from paged_optax.backend.text import path_name
from paged_optax.backend.types import KeyPath
from paged_optax.backend.user_warnings import warn_user
from paged_optax.planning.hugging_face import (
    MOST_BYTES,
    MOST_TENSORS,
    Fields,
    config_shapes,
    index_files,
    index_shapes,
    opened,
)

#: Bits of a value by safetensors' names of dtypes, and the name in JAX of those that
#: parameters have. From https://docs.rs/safetensors/latest/safetensors/tensor.
_DTYPES: Mapping[str, tuple[int, str | None]] = {
    "BOOL": (8, None),
    "F4": (4, "float4_e2m1fn"),
    "F6_E2M3": (6, "float6_e2m3fn"),
    "F6_E3M2": (6, "float6_e3m2fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
} | {f"{sign}{bits}": (bits, None) for sign in "IU" for bits in (8, 16, 32, 64)}

#: What Orbax writes as JSON beside the arrays, and reads first.
_ORBAX_JSON = ("_CHECKPOINT_METADATA", "_METADATA", "_sharding", "array_metadatas/*")


def checkpoint_shapes(path: str | pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes of the floating point arrays in a checkpoint.

    Files may be anybody's: they are read within bounds, and nothing in them is run.

    Args:
      path: A `.safetensors` file, of which the header is enough; Hugging Face's
        `model.safetensors.index.json` or `config.json`, with or without weights beside
        it; a folder with any of these; or a checkpoint of Orbax, of which `"params"` is
        taken where it has that.

    Returns:
      `ShapeDtypeStruct`s: by name for safetensors, layers stacked under `"layers"` for
      `config.json`, a pytree for Orbax.

    Raises:
      ValueError: If nothing there can be read; it names the file and the field.
    """
    name, path = str(path), pathlib.Path(path)
    try:
        there = bool(name) and path.exists()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"checkpoint {name!r}: {error.strerror}.") from error
    if not there:
        raise ValueError(f"checkpoint {name!r} does not exist.")
    shapes = _shapes(path)
    if not jax.tree.leaves(shapes):
        raise ValueError(f"checkpoint {str(path)!r} has no floating point arrays.")
    return shapes


def _shapes(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    if path.is_dir():
        # An index says which of the files are the model, and if one is missing.
        for pattern in ("*.safetensors.index.json", "*.safetensors", "config.json"):
            files = sorted(path.glob(pattern))
            if files and pattern != "*.safetensors":
                return _shapes(files[0])
            if files:
                return _headers(files)
        return _orbax(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {str(path)!r} is neither a file nor a folder.")
    if path.name.endswith(".index.json"):
        files = index_files(path)
        return _headers(files) if all(x.exists() for x in files) else index_shapes(path)
    return config_shapes(path) if path.suffix == ".json" else _headers([path])


def _headers(paths: Sequence[pathlib.Path]) -> dict[str, jax.ShapeDtypeStruct]:
    tensors: dict[str, jax.ShapeDtypeStruct] = {}
    packed = 0
    for path in paths:
        new, more = _header(path)
        tensors |= new
        packed += more
        if len(tensors) > MOST_TENSORS:
            raise ValueError(f"{str(path)!r}: more than {MOST_TENSORS} tensors.")
    if packed > nbytes(tensors) / 5:  # less may be masks
        warn_user(
            f"{str(paths[0].parent)!r}: {packed} bytes of whole numbers, as quantized"
            f" weights are, are left out; the {nbytes(tensors)} bytes of floating point"
            " are counted."
        )
    return tensors


def _header(path: pathlib.Path) -> tuple[dict[str, jax.ShapeDtypeStruct], int]:
    """Reads a safetensors file's header: its length in eight bytes, then JSON.

    The format is described at https://github.com/huggingface/safetensors#format.
    """
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        # A header may claim any length: it has no more than the file, and no more than
        # any model needs.
        if length > min(MOST_BYTES, path.stat().st_size - 8):
            raise ValueError(
                f"{str(path)!r} is no safetensors file: its header would have {length}"
                " bytes."
            )
        fields = Fields(path, file.read(length))
    tensors: dict[str, jax.ShapeDtypeStruct] = {}
    places: list[tuple[tuple[int, int], str]] = []
    packed = 0
    for name, value in fields.entries.items():
        if name == "__metadata__":
            value = {} if value is None else value
            for key, text in fields.mapping(name, value).items():
                if not isinstance(text, str):
                    raise fields.wrong(f"{name}.{key}", text, "a text")
            continue
        tensor = fields.mapping(name, value)
        shape = fields.shape(f"{name}.shape", tensor.get("shape"))
        dtype = tensor.get("dtype")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise fields.wrong(f"{name}.dtype", dtype, f"one of {', '.join(_DTYPES)}")
        bits, known = _DTYPES[dtype]
        place = fields.ends(f"{name}.data_offsets", tensor.get("data_offsets"))
        if 8 * (place[1] - place[0]) != bits * math.prod(shape):
            wanted = f"the two ends of {bits * math.prod(shape) / 8:g} bytes"
            raise fields.wrong(f"{name}.data_offsets", [*place], wanted)
        places.append((place, name))
        if known is not None:
            tensors[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(known))
        elif dtype[0] in "IU" and bits < 64:
            packed += place[1] - place[0]
    # Tensors lie one after the other, without gaps.
    end = 0
    for (first, last), name in sorted(places):
        if first != end:
            wanted = f"from {end}, where those before it end"
            raise fields.wrong(f"{name}.data_offsets", [first, last], wanted)
        end = last
    return tensors, packed


def _orbax(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ValueError(
            f"checkpoint {str(path)!r} has no .safetensors file; to read Orbax's,"
            " install orbax-checkpoint."
        ) from error
    tree = None
    if any(path.glob("*_METADATA")):  # Without it Orbax warns.
        for pattern in _ORBAX_JSON:
            for file in path.glob(pattern):
                Fields.of_file(file)  # Orbax sets no bounds.
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                metadata = checkpointer.metadata(path.resolve())
        except Exception as error:  # Orbax has no error of its own for it.
            said = f"{type(error).__name__}: {error}"[:300]
            raise ValueError(
                f"checkpoint {str(path)!r}: Orbax cannot read its metadata ({said})."
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
    return jax.tree_util.tree_map_with_path(functools.partial(_shape_of, path), tree)


def _shape_of(
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
