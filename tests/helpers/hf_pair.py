"""A folder's model, trained here and by transformers and PEFT on the same batches.

Torch and transformers are optional: only slow tests import this.
`python tests/helpers/hf_pair.py` records transformers' losses for where they are not.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import paged_optax as po
from helpers import hf_folders

RATE, MOST = 1e-3, 1.0
HOW = {"b1": 0.9, "b2": 0.95, "eps": 1e-4, "weight_decay": 0.01}


@dataclasses.dataclass
class Here:
    """A folder's model, a method, and what is trained."""

    folder: Any
    method: Any
    split: po.SplitModel
    params: Any
    frozen: tuple[Any, ...]

    @classmethod
    def of(cls, modules: Any, path: Any, method: str, row: Any) -> "Here":
        folder = modules.folder.Folder.open(path)
        decoder = modules.model.Decoder.of(folder, np.float32)
        made = modules.methods.Full(decoder)
        if method != "full":
            given = ["--checkpoint", "", "--output", "", "--text", "", "--rank", "4"]
            given += ["--alpha", "8", "--method", method]
            args = modules.command.parse_arguments(given)
            made = modules.methods.Lora(decoder, args)
        split = po.split_layers(made.loss, made.params, row, frozen=made.frozen)
        first, host = made.first(folder), {"on_host": True, "min_size": "1KiB"}
        if method == "full":
            return cls(folder, made, split, split.stack(first, **host), ())
        # Adapters do nothing at the beginning; these do.
        draw = np.random.default_rng(1).standard_normal
        noise = lambda x: x + 0.05 * draw(x.shape).astype(np.float32)
        params = jax.tree.map(jnp.asarray, split.stack(jax.tree.map(noise, first)))
        frozen = split.stack_frozen(made.read_frozen(folder), **host)
        return cls(folder, made, split, params, (frozen,))

    def train(self, batches: Sequence[Any]) -> list[float]:
        """Layer by layer, with moments and gradients on the host."""
        tx = po.paged_adamw(optax.constant_schedule(RATE), **HOW)
        workspace = self.split.workspace(self.params, host_dtype="float32")
        args = self.params, self.split.init(tx, self.params), workspace
        step = po.layerwise_step(self.split, tx, max_norm=MOST, accumulate=True)
        step, losses = jax.jit(step), []
        for batch in batches:
            *args, output = step(*args, batch, *self.frozen)
            losses.append(float(output.loss))
        self.params = args[0]
        return losses


def there(path: Any) -> torch.nn.Module:
    """The model of transformers."""
    config = transformers.AutoConfig.from_pretrained(path)
    kind = getattr(transformers, config.architectures[0])
    model, loaded = kind.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    return model


def with_adapters(model: torch.nn.Module, path: Any) -> torch.nn.Module:
    """With those that a folder has, of which none is missing, to be trained."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PEFT 0.21 reads a name that transformers 5.24 deprecates.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")
        return peft.PeftModel.from_pretrained(model, path, is_trainable=True)


def train_there(model: torch.nn.Module, batches: Sequence[Any]) -> list[float]:
    """By torch's AdamW."""
    betas = HOW["b1"], HOW["b2"]
    trained = [x for x in model.parameters() if x.requires_grad]
    adamw = torch.optim.AdamW(trained, RATE, betas, HOW["eps"], HOW["weight_decay"])
    losses = []
    for batch in batches:
        loss = loss_there(model, batch)
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, MOST)
        adamw.step()
        losses.append(loss.item())
    return losses


def loss_there(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The mean loss of the tokens that count."""
    given = {n: torch.tensor(np.asarray(x)).long() for n, x in batch.items()}
    config = model.config.get_text_config()
    mask = _mask(batch["segments"], None)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        near = _mask(batch["segments"], config.sliding_window)
        mask = {"full_attention": mask, "sliding_attention": near}
    logits = model(
        input_ids=given["tokens"], position_ids=given["positions"], attention_mask=mask
    ).logits
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), given["labels"].flatten(), reduction="none"
    )
    weights = torch.tensor(np.asarray(batch["weights"])).flatten()
    return (each * weights).sum() / weights.sum()


def _mask(segments: Any, window: int | None) -> torch.Tensor:
    """What is added to the scores: tokens see their own document, or a window of it."""
    seen = np.tril(segments[:, :, None] == segments[:, None, :])
    if window is not None:
        seen = np.triu(seen, 1 - window)
    least = torch.finfo(torch.float32).min
    return torch.where(torch.tensor(seen)[:, None], 0.0, least)


def in_transformers(ours: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A folder's tensors under transformers' names, experts all in one."""
    before = ("language_model.model.", "vision_tower.", "multi_modal_projector.")
    found = dict[str, np.ndarray]()
    experts = dict[str, list[np.ndarray]]()
    for name, x in ours.items():
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            experts.setdefault(f"{layer}.experts.{rest.split('.')[1]}", []).append(x)
            continue
        if name.startswith(before):
            name = f"model.{name.replace('language_model.model.', 'language_model.')}"
        found[name] = np.asarray(x)
    for name, each in experts.items():
        if name.endswith("down_proj"):
            found[name] = np.stack(each)
        elif name.endswith("gate_proj"):
            up = np.stack(experts[name.replace("gate_proj", "up_proj")])
            both = np.concatenate([np.stack(each), up], 1)
            found[name.replace("gate_proj", "gate_up_proj")] = both
    return found


def way_apart(
    found: Mapping[str, Any], theirs: Mapping[str, Any], start: Mapping[str, Any]
) -> float:
    """How far parameters are apart, over the way that they went."""
    apart = way = 0.0
    for name, x in theirs.items():
        apart += float(np.sum((found[name] - x) ** 2))
        way += float(np.sum((x - start[name]) ** 2))
    return float(np.sqrt(apart / way))


def parameters(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Copies of those that are trained."""
    named = ((n, x) for n, x in model.named_parameters() if x.requires_grad)
    return {name: x.detach().numpy().copy() for name, x in named}


def main() -> None:
    """Records the losses of each family's folder, row by row."""
    modules, losses = hf_folders.modules(), {}
    with tempfile.TemporaryDirectory() as path:
        made = hf_folders.Made(pathlib.Path(path))
        for family in hf_folders.FAMILIES:
            model = there(made(family))
            rows = (
                {n: x[None] for n, x in row.items()}
                for row in hf_folders.rows(modules.text)
            )
            losses[family] = [loss_there(model, row).item() for row in rows]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record = pathlib.Path(__file__).parents[1] / "data" / "hf_losses.json"
    record.write_text(json.dumps(versions | {"losses": losses}, indent=2) + "\n")


if __name__ == "__main__":
    main()
