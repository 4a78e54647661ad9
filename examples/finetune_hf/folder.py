"""A Hugging Face folder: its configuration, and its weights, read and written in place.

Weights are mapped into memory and read when they are used. They are written back into
files that begin with the same headers: what was not trained comes out bit for bit.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

#: By the format's documentation: https://huggingface.co/docs/safetensors
DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
#: Bytes of a file's beginning and end by which it is known again.
SAMPLE = 1 << 20
#: Files of weights in any format, which a new folder does not take over.
WEIGHTS = re.compile(
    r"[.](safetensors|(bin|pth?|ckpt|gguf|h5|msgpack|onnx|ot)([.]index[.]json)?)$"
)
#: Hidden entries, and those of a run whose output is in the folder.
OURS = re.compile(r"^[.]|[.](run|writing)$")
BIN = """{0} has weights in .bin alone. With torch two lines convert them:
from transformers import AutoModelForCausalLM as Model
Model.from_pretrained({1}, dtype="auto").save_pretrained({1})"""


class FolderError(ValueError):
    """Input that the command refuses: it says why, and what to do.

    All that reads a folder, a text or a run raises it.
    """


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor is: its first byte in the file of this name."""

    file: str
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder with `config.json`, and `.safetensors` files with their headers."""

    path: pathlib.Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    headers: Mapping[str, bytes]

    @classmethod
    def open(cls, path: pathlib.Path) -> "Folder":
        """Reads the configuration and the files' headers."""
        if not path.is_dir():
            raise FolderError(f"{path} is no folder: pass one with a config.json.")
        there = path / "config.json"
        if (path / "adapter_config.json").exists() and not there.exists():
            raise FolderError(f"{path} has adapters alone: give their model's folder.")
        config = _json(there)
        index = path / "model.safetensors.index.json"
        if (path / "model.safetensors").exists():  # first, as for transformers
            files = ["model.safetensors"]
        elif index.exists():
            named = _json(index).get("weight_map")
            if not isinstance(named, dict):
                raise FolderError(f"{index} has no weight_map: download it again.")
            files = sorted(set(named.values()))
        else:
            files = sorted(x.name for x in path.glob("*.safetensors"))
        if not files and any(path.glob("*.bin")):
            raise FolderError(BIN.format(path, repr(str(path))))
        if not files:
            raise FolderError(f"{path} has no .safetensors files: download it again.")
        tensors, headers = dict[str, Tensor](), dict[str, bytes]()
        for name in files:
            headers[name], found = _read_header(path / name)
            tensors |= found
        return cls(path, config, tensors, headers)

    @classmethod
    def of_adapter(cls, path: pathlib.Path) -> "Folder":
        """Reads the configuration and the header of PEFT's adapters."""
        config, name = _json(path / "adapter_config.json"), "adapter_model.safetensors"
        header, tensors = _read_header(path / name)
        return cls(path, config, tensors, {name: header})

    @property
    def dtype(self) -> np.dtype:
        """The dtype of most of the weights."""
        sizes = dict[np.dtype, int]()
        for x in self.tensors.values():
            sizes[x.dtype] = sizes.get(x.dtype, 0) + x.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype])

    def fingerprint(self) -> str:
        """A hash of the configuration, and of the beginning and end of each file."""
        found = hashlib.sha256(json.dumps(dict(self.config)).encode())
        for name, header in self.headers.items():
            found.update(header)
            with (self.path / name).open("rb") as file:
                for start in (len(header), -min(SAMPLE, file.seek(0, 2))):
                    file.seek(start, 0 if start >= 0 else 2)
                    found.update(file.read(SAMPLE))
        return found.hexdigest()

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor, mapped into memory."""
        where = self.tensors[name]
        return np.memmap(
            self.path / where.file, where.dtype, "r", where.start, where.shape
        )

    def write(
        self, path: pathlib.Path, values: Iterator[tuple[str, np.ndarray]]
    ) -> None:
        """Writes a folder like this one with other weights, in the dtypes of here."""
        with new_folder(path) as partial:
            self.copy(partial, "*")
            for name, header in self.headers.items():
                (partial / name).write_bytes(header)
            missing = dict(self.tensors)
            for name, value in values:
                where = missing.pop(name)
                if value.shape != where.shape:
                    raise FolderError(f"{name} has shape {value.shape} here.")
                with (partial / where.file).open("r+b") as file:
                    file.seek(where.start)
                    file.write(np.ascontiguousarray(value, where.dtype).tobytes())
            if missing:
                raise FolderError(f"{min(missing)} was not written to {path}.")

    def copy(self, path: pathlib.Path, *patterns: str) -> None:
        """Copies what `beside` lists into another folder."""
        for entry in self.beside(*patterns)[0]:
            copy = shutil.copytree if entry.is_dir() else shutil.copy
            copy(entry, path / entry.name)

    def beside(self, *patterns: str) -> tuple[list[pathlib.Path], list[str]]:
        """Lists what a new folder takes over beside weights, and the others' names.

        Folders with weights, such as checkpoints, are not taken. A file that cannot be
        opened is an error now.
        """
        taken, left = list[pathlib.Path](), list[str]()
        for entry in sorted(self.path.iterdir()):
            files = [x for x in (entry, *entry.rglob("*")) if not x.is_dir()]
            named = any(fnmatch.fnmatch(entry.name, x) for x in patterns)
            if not named or OURS.search(entry.name):
                left.append(entry.name)
            elif any(WEIGHTS.search(x.name) for x in files):
                left.append(entry.name)
            else:
                taken.append(entry)
                for file in files:
                    file.open("rb").close()
        return taken, [name for name in left if name not in self.headers]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """An array that is read when it is used: a tensor, or several stacked."""

    folder: Folder
    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: np.dtype  # to which they are converted

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        parts = [self.folder[name] for name in self.names]
        x = np.asarray(parts[0]) if len(parts) == 1 else np.stack(parts)
        return x.astype(dtype or self.dtype, copy=bool(copy))


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder, which has another name until it is whole."""
    refuse_existing(path)
    partial = path.with_name(f"{path.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(path)


def refuse_existing(path: pathlib.Path) -> None:
    """Refuses to overwrite."""
    if path.exists():
        raise FolderError(f"{path} exists: name another output, or remove it.")


def _json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FolderError(f"{path} is missing: download the folder again.") from None
    except ValueError as error:
        raise FolderError(f"{path} is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise FolderError(f"{path} is no JSON object.")
    return found


def _read_header(path: pathlib.Path) -> tuple[bytes, dict[str, Tensor]]:
    """What a file begins with, and where its tensors are."""
    if not path.exists():
        raise FolderError(f"{path} is missing: download the folder again.")
    size = path.stat().st_size
    broken = FolderError(
        f"{path} is not whole: it has {size:,} bytes. Download it again."
    )
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > size - 8:
            raise broken
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        start = 8 + length
        tensors = {}
        for name, entry in entries.items():
            if entry["dtype"] not in DTYPES:
                raise FolderError(
                    f"{name} in {path} has dtype {entry['dtype']}: weights are in"
                    f" {', '.join(DTYPES)}."
                )
            dtype, begin = np.dtype(DTYPES[entry["dtype"]]), entry["data_offsets"][0]
            where = Tensor(path.name, start + begin, dtype, tuple(entry["shape"]))
            tensors[name] = where
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, FolderError) else broken from None
    if any(x.start + x.nbytes > size for x in tensors.values()):
        raise broken
    return first + text, tensors
