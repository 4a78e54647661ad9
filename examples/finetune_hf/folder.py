"""A Hugging Face folder: its configuration, and weights read when they are used."""

import collections
import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

#: Names of tensors and their values.
Values = Iterable[tuple[str, np.ndarray]]
#: By the format's documentation: https://huggingface.co/docs/safetensors
DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16}
#: Bytes of a file's beginning and end that its fingerprint hashes.
SAMPLE = 1 << 20
#: Files of weights in any format, which are not copied.
WEIGHTS = re.compile(
    r"[.](safetensors|(bin|pth?|ckpt|gguf|h5|msgpack|onnx|ot)([.]index[.]json)?)$"
)
#: Hidden entries, and those of a run whose output is in the folder.
OURS = re.compile(r"^[.]|[.](run|writing)$")
BIN = """{0} has weights in .bin alone. With torch two lines convert them:
from transformers import AutoModelForCausalLM as Model
Model.from_pretrained({1}, dtype="auto").save_pretrained({1})"""


class FolderError(ValueError):
    """Unusable input. The message names the reason and the way out."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Place of a tensor: a file's name and the first byte there."""

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
        if not path.is_dir():
            raise FolderError(f"{path} is no folder: download the model into one.")
        file = path / "config.json"
        if (path / "adapter_config.json").exists() and not file.exists():
            raise FolderError(f"{path} has adapters alone: give their model's folder.")
        config, index = _json(file), path / "model.safetensors.index.json"
        if (path / "model.safetensors").exists():  # first, as for transformers
            files = ["model.safetensors"]
        elif index.exists():
            weights = _json(index).get("weight_map")
            if not isinstance(weights, dict):
                raise FolderError(f"{index} has no weight_map: download it again.")
            files = sorted(set(weights.values()))
        else:
            files = sorted(x.name for x in path.glob("*.safetensors"))
        if not files and any(path.glob("*.bin")):
            raise FolderError(BIN.format(path, repr(str(path))))
        if not files:
            raise FolderError(f"{path} has no .safetensors files: download it again.")
        return cls._of(path, config, files)

    @classmethod
    def of_adapter(cls, path: pathlib.Path) -> "Folder":
        if not (file := path / "adapter_config.json").exists():
            raise FolderError(f"--adapter {path} has no adapters: is it --checkpoint?")
        return cls._of(path, _json(file), ["adapter_model.safetensors"])

    @classmethod
    def _of(
        cls, path: pathlib.Path, config: Mapping[str, Any], files: Sequence[str]
    ) -> "Folder":
        read = {name: _read_header(path / name) for name in files}
        tensors = {name: x for _, file in read.values() for name, x in file.items()}
        return cls(path, config, tensors, {name: x for name, (x, _) in read.items()})

    @property
    def dtype(self) -> np.dtype:
        sizes = collections.Counter[np.dtype]()
        for x in self.tensors.values():
            sizes[x.dtype] += x.nbytes
        return sizes.most_common(1)[0][0]

    def fingerprint(self) -> str:
        """Hashes the configuration, and the beginning and end of each file."""
        digest = hashlib.sha256(json.dumps(dict(self.config)).encode())
        for name, header in self.headers.items():
            digest.update(header)
            with (self.path / name).open("rb") as file:
                for start in (len(header), max(0, file.seek(0, 2) - SAMPLE)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE))
        return digest.hexdigest()

    def __getitem__(self, name: str) -> np.ndarray:
        x = self.tensors[name]
        return np.memmap(self.path / x.file, x.dtype, "r", x.start, x.shape)

    def write(self, path: pathlib.Path, values: Values) -> None:
        """Writes a copy of this folder in which some tensors have other values."""
        with new_folder(path) as partial:
            self.copy(partial, "*")
            for name, header in self.headers.items():
                (partial / name).write_bytes(header)
            untrained = {*self.tensors}
            for name, value in values:
                untrained.remove(name)
                self._put(partial, name, value)
            for name in untrained:
                self._put(partial, name, self[name])

    def _put(self, path: pathlib.Path, name: str, value: np.ndarray) -> None:
        x = self.tensors[name]
        if value.shape != x.shape:
            raise FolderError(f"{name} has shape {value.shape} here.")
        with (path / x.file).open("r+b") as file:
            file.seek(x.start)
            file.write(np.ascontiguousarray(value, x.dtype).tobytes())

    def copy(self, path: pathlib.Path, *patterns: str) -> None:
        """Copies what `beside` lists into another folder."""
        for entry in self.beside(*patterns)[0]:
            copy = shutil.copytree if entry.is_dir() else shutil.copy
            copy(entry, path / entry.name)

    def beside(self, *patterns: str) -> tuple[list[pathlib.Path], list[str]]:
        """Lists what is copied beside weights, and the names of all else."""
        copied, left = list[pathlib.Path](), list[str]()
        for entry in sorted(self.path.iterdir()):
            files = [x for x in (entry, *entry.rglob("*")) if not x.is_dir()]
            matches = any(fnmatch.fnmatch(entry.name, x) for x in patterns)
            has_weights = any(WEIGHTS.search(x.name) for x in files)
            if not matches or OURS.search(entry.name) or has_weights:
                left.append(entry.name)
                continue
            copied.append(entry)
            for file in files:
                file.open("rb").close()
        return copied, [name for name in left if name not in self.headers]


@dataclasses.dataclass(frozen=True)
class Tensors:
    """An array that is read when it is used: a tensor, or several stacked."""

    folder: Folder
    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: np.dtype  # to which they are converted

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = [self.folder[name] for name in self.names]
        x = np.asarray(parts[0]) if len(parts) == 1 else np.stack(parts)
        return x.astype(dtype or self.dtype, copy=bool(copy))


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a folder, which has another name until it is whole."""
    refuse_existing(path)
    partial = path.with_name(f"{path.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    yield partial
    partial.rename(path)


def make_folder(path: pathlib.Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{path} cannot be made ({error.strerror})"
        raise FolderError(f"{why}: give another --output.") from None


def refuse_existing(path: pathlib.Path) -> None:
    if path.exists():
        raise FolderError(f"{path} exists: name another output, or remove it.")


def _json(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        raise FolderError(f"{path} is missing: download the folder again.") from None
    except ValueError as error:
        raise FolderError(f"{path} is no JSON: {error}.") from None
    if not isinstance(entries, dict):
        raise FolderError(f"{path} is no JSON object.")
    return entries


def _read_header(path: pathlib.Path) -> tuple[bytes, dict[str, Tensor]]:
    """Reads the bytes before the tensors, and the tensors' places."""
    if not path.exists():
        raise FolderError(f"{path} is missing: download the folder again.")
    size, tensors, types = path.stat().st_size, dict[str, Tensor](), dict[str, str]()
    with path.open("rb") as file:
        first = file.read(8)
        text = file.read(min(int.from_bytes(first, "little"), size))
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        for name, x in entries.items():
            types[x["dtype"]] = name
            dtype = np.dtype(DTYPES.get(x["dtype"], np.uint8))
            start = 8 + len(text) + x["data_offsets"][0]
            tensors[name] = Tensor(path.name, start, dtype, tuple(x["shape"]))
        whole = all(x.start + x.nbytes <= size for x in tensors.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise FolderError(f"{path} is not whole ({size:,} bytes): download it again.")
    for dtype in types.keys() - DTYPES.keys():
        raise FolderError(
            f"{types[dtype]} in {path} has dtype {dtype}: weights are in"
            f" {', '.join(DTYPES)}."
        )
    return first + text, tensors
