"""Shapes of the parameters in a checkpoint, of which no array is read."""

import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from paged_optax.planning.shapes.hugging_face import (
    config_shapes,
    index_files,
    index_shapes,
)
from paged_optax.planning.shapes.untrusted import MOST_BYTES, MOST_TENSORS, Fields

#: safetensors' names of the dtypes that parameters have.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


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
    given, path = str(path), pathlib.Path(path)
    if not given or not path.exists():
        raise ValueError(f"checkpoint {given!r} does not exist.")
    found = _shapes(path)
    if not jax.tree.leaves(found):
        raise ValueError(f"checkpoint {str(path)!r} has no floating point arrays.")
    return found


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
    """The tensors of several files together."""
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for path in paths:
        found |= _header(path)
        if len(found) > MOST_TENSORS:
            raise ValueError(f"{str(path)!r}: more than {MOST_TENSORS} tensors.")
    return found


def _header(path: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads a safetensors file's header: its length in eight bytes, then JSON.

    The format is described at https://github.com/huggingface/safetensors#format.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MOST_BYTES, path.stat().st_size):
            raise ValueError(
                f"{str(path)!r} is no safetensors file: its header would have {length}"
                " bytes."
            )
        fields = Fields(path, file.read(length))
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for name, given in fields.given.items():
        if name == "__metadata__":
            continue
        tensor = fields.mapping(name, given)
        shape = fields.shape(f"{name}.shape", tensor.get("shape"))
        dtype = tensor.get("dtype")
        if not isinstance(dtype, str):
            raise fields.wrong(f"{name}.dtype", dtype, "the name of a dtype")
        if dtype in _DTYPES:
            found[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(_DTYPES[dtype]))
    return found


def _orbax(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    """Reads the metadata of an Orbax checkpoint."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ValueError(
            f"checkpoint {str(path)!r} has no .safetensors file; to read Orbax's,"
            " install orbax-checkpoint."
        ) from error
    tree = None
    if any(path.glob("*_METADATA")):  # Orbax's own; without it there is a warning.
        with ocp.StandardCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path.resolve())
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
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else None
        ),
        tree,
    )
