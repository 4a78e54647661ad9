"""The most host memory that a run of `finetune_hf` has as it reads weights.

`python tests/helpers/hf_memory.py FOLDER` writes folders of half a GiB there, and
prints, for each method and way, the memory of the process over the weights. Files that
are mapped into memory do not count: the kernel takes their pages back.
"""

import ctypes
import json
import pathlib
import sys
import threading
import time
from typing import Any

import jax
import numpy as np

HERE = pathlib.Path(__file__)
sys.path += [str(HERE.parents[1]), str(HERE.parents[2] / "examples")]

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "intermediate_size": 1024,
}
CONFIGS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 4096},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
}


def write(path: pathlib.Path, config: dict[str, Any]) -> None:
    """A folder of zeros."""
    from finetune_hf.folder import Folder
    from finetune_hf.model import Decoder
    from safetensors.numpy import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    decoder = Decoder.of(Folder(path, config, {}, {}), "bfloat16")
    tensors = {}
    for keys, x in jax.tree_util.tree_leaves_with_path(decoder.shapes):
        names = decoder.names(keys)
        shape = x.shape[len(names) > 1 :]
        tensors |= {name: np.zeros(shape, x.dtype) for name in names}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def run_of(path: pathlib.Path, method: str, way: str) -> Any:
    """A run that has read nothing yet."""
    from finetune_hf.arguments import parse_arguments
    from finetune_hf.folder import Folder
    from finetune_hf.model import Decoder
    from finetune_hf.run import Run

    folder = Folder.open(path)
    decoder = Decoder.of(folder, folder.dtype)
    tokens = np.zeros(16, np.int32)
    row = dict.fromkeys(("tokens", "labels", "positions", "segments"), tokens)
    row["weights"] = np.zeros(16, np.float32)
    needed = ["--checkpoint", str(path), "--text", "", "--output", ""]
    chosen = ["--method", method, "--way", way]
    args = parse_arguments([*needed, *chosen])
    return Run.on(args, folder, decoder, [row])


def anonymous() -> int:
    """Bytes of the process that no file has."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def most(read: Any) -> int:
    """The most bytes beside those before, as something is read."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there any more
    before, found, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            found[0] = max(found[0], anonymous() - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    kept = jax.block_until_ready(read())
    done.set()
    thread.join()
    del kept
    return found[0]


def main() -> None:
    """Writes, reads and prints."""
    shares = {}
    for name, config in CONFIGS.items():
        path = pathlib.Path(sys.argv[1]) / name
        write(path, SIZES | config)
        for method, way in (("full", "host"), ("full", "all"), ("qlora", "host")):
            run = run_of(path, method, way)
            size = sum(x.nbytes for x in run.folder.tensors.values())

            def read(run: Any = run, method: str = method) -> Any:
                if method == "full":
                    return run.trained(run.method.first(run.folder))
                return run.placed(run.way, run.method.read_frozen(run.folder))

            jax.block_until_ready(read())  # compiles
            shares[f"{name}, {method}, {way}"] = round(most(read) / size, 3)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
