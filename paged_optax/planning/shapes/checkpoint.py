"""Shapes of the parameters in a checkpoint, of which no array is read."""

import json
import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

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

    Args:
      path: A `.safetensors` file; a folder of several, as Hugging Face has them; or a
        checkpoint of Orbax, of which `"params"` is taken where it has that.

    Returns:
      `ShapeDtypeStruct`s: by name for safetensors, a pytree for Orbax.

    Raises:
      ValueError: If nothing there can be read.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"checkpoint {str(path)!r} does not exist.")
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if files:
        found = {name: x for file in files for name, x in _header(file).items()}
    else:
        found = _orbax(path)
    if not jax.tree.leaves(found):
        raise ValueError(f"checkpoint {str(path)!r} has no floating point arrays.")
    return found


def _header(path: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads a safetensors file's header: its length in eight bytes, then JSON.

    The format is described at https://github.com/huggingface/safetensors#format.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no safetensors file: {error}.") from error
    return {
        name: jax.ShapeDtypeStruct(tuple(x["shape"]), jnp.dtype(_DTYPES[x["dtype"]]))
        for name, x in header.items()
        if name != "__metadata__" and x["dtype"] in _DTYPES
    }


def _orbax(path: pathlib.Path) -> PyTree[jax.ShapeDtypeStruct]:
    """Reads the metadata of an Orbax checkpoint."""
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ValueError(
            f"checkpoint {str(path)!r} has no .safetensors file; to read Orbax's,"
            " install orbax-checkpoint."
        ) from error
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path.resolve())
    tree = getattr(metadata, "item_metadata", metadata)
    tree = getattr(tree, "tree", tree)
    if isinstance(tree, dict):
        tree = tree.get("params", tree)
    if tree is None:
        raise ValueError(
            f"{str(path)!r} has no .safetensors file and is no Orbax checkpoint of"
            " arrays: pass the folder that a checkpointer saved to (of a"
            " CheckpointManager, such as 100/default)."
        )
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype)
            if jnp.issubdtype(x.dtype, jnp.inexact)
            else None
        ),
        tree,
    )
