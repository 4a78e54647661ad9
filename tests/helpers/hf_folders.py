"""Tiny folders of random weights in each family's structure.

`python tests/helpers/hf_folders.py FOLDER TEXT` writes one, and a text. What the
example's own packages are needed for is imported where it is used: they are optional.
"""

import importlib
import json
import pathlib
import sys
import types
from typing import Any

import jax
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 7,  # which texts have: its embedding learns as an output alone
}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
#: As Llama 3.2 has it, for texts that are longer than 32 tokens.
SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"norm_topk_prob": True, "decoder_sparse_step": 1}
#: Seven layers: five that see a window, one that sees all, one more.
GEMMA = {
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
#: What sees pictures beside it.
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
#: For each family the class of its configuration, and what differs.
FAMILIES = {
    "qwen3": ("Qwen3Config", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {"rope_parameters": SCALED}),
    "mistral": ("MistralConfig", {"rope_parameters": PLAIN, "sliding_window": None}),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "qwen3_moe": ("Qwen3MoeConfig", {"rope_parameters": PLAIN, **EXPERTS}),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


#: Tokens of a text's row; of random documents' twice as many.
LENGTH = 64


def modules() -> types.ModuleType:
    """The example, as a package."""
    for name in ("command", "methods", "model"):  # which import the others
        importlib.import_module(f"finetune_hf.{name}")
    return sys.modules["finetune_hf"]


def rows(text: Any) -> list[Any]:
    """Random documents, packed; not all of their tokens are learned."""
    draw = np.random.default_rng(0)
    found = [
        text.Document(
            draw.integers(5, 320, n).tolist(), (draw.random(n) < 0.7).tolist()
        )
        for n in (40, 90, 200, 30, 150)
    ]
    return text.rows(found, 2 * LENGTH)


class Made:
    """Folders in a folder, each made when it is first asked for."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __call__(self, family: str, dtype: str = "float32") -> pathlib.Path:
        path = self.path / f"{family}_{dtype}"
        if not path.exists():
            if family == "gemma3_pictures":
                write_pictures(path)
            else:
                write(family, path, dtype=dtype)
        return path


def write(family: str, path: pathlib.Path, *, dtype: str = "float32") -> None:
    """A folder with a model of random weights and a tokenizer."""
    import transformers

    kind, others = FAMILIES[family]
    config = getattr(transformers, kind)(**SIZES | others, dtype=dtype)
    name = kind.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    config.architectures = [name]
    config.save_pretrained(path)
    draw = np.random.default_rng(0)

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        # No norm is one, and layers do something.
        value = draw.normal(size=shape) * (0.06 if len(shape) > 1 else 0.1)
        return value + ("norm" in name and family != "gemma3")  # it adds one itself

    write_weights(path, dtype, value)
    write_tokenizer(path)


def write_weights(path: pathlib.Path, dtype: str, value: Any) -> None:
    """The weights of a folder that has a configuration, of names and shapes."""
    from finetune_hf.folder import Folder
    from finetune_hf.model import Decoder
    from safetensors.numpy import save_file

    config, tensors = json.loads((path / "config.json").read_text()), {}
    decoder = Decoder.of(Folder(path, config, {}, {}), dtype)
    for keys, x in jax.tree_util.tree_leaves_with_path(decoder.shapes):
        names = decoder.names(keys)
        for name in names:
            made = value(name, x.shape[len(names) > 1 :])
            tensors[name] = made.astype(x.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def run_of(folder: Any, length: int, *given: str) -> Any:
    """A run of a row of zeros, that has read nothing yet."""
    from finetune_hf.arguments import parse_arguments
    from finetune_hf.model import Decoder
    from finetune_hf.run import Run

    tokens = np.zeros(length, np.int32)
    row = dict.fromkeys(("tokens", "labels", "positions", "segments"), tokens)
    row["weights"] = np.zeros(length, np.float32)
    needed = "--checkpoint", str(folder.path), "--text", "", "--output", ""
    args = parse_arguments([*needed, *given])
    return Run.on(args, folder, Decoder.of(folder, folder.dtype), [row])


def write_pictures(path: pathlib.Path) -> None:
    """A folder of a Gemma 3 that sees pictures too, as transformers makes it."""
    import torch
    import transformers

    text = SIZES | GEMMA
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    for name, x in model.named_parameters():
        x.data += 0.05 * torch.randn_like(x) * ("language" in name)
    model.save_pretrained(path)
    write_tokenizer(path)


def write_tokenizer(path: pathlib.Path) -> None:
    """A tokenizer of bytes, and a few special tokens."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"},
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


#: What the tiny models learn.
TEXT = "".join(f"{n}: the quick brown fox and {n * n}\n" for n in range(150))

if __name__ == "__main__":
    write("qwen3", pathlib.Path(sys.argv[1]), dtype="bfloat16")
    pathlib.Path(sys.argv[2]).write_text(TEXT)
