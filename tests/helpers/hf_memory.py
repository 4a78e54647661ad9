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

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from helpers import hf_folders

SIZES = {"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 24}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
SIZES |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
EXPERTS |= {"norm_topk_prob": True, "intermediate_size": 1024}
CONFIGS = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 4096},
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
}


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
        path.mkdir()
        (path / "config.json").write_text(json.dumps(SIZES | config))
        hf_folders.write_weights(path, "bfloat16", lambda name, shape: np.zeros(shape))
        opened = hf_folders.modules().folder.Folder.open(path)
        for method, way in (("full", "host"), ("full", "all"), ("qlora", "host")):
            chosen = "--method", method, "--way", way
            run = hf_folders.run_of(opened, 16, *chosen)
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
