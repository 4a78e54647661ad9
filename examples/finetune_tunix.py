"""Fine-tune with Tunix: its own trainers, the moments in host memory.

Tunix trains, accumulates gradients, saves and resumes as it always does; the optimizer
is `paged_adamw_8bit`. `Paged` and the two classes after it are all that a script of
yours needs.

    pip install ".[tunix]"
    python examples/finetune_tunix.py                      # LoRA, on one device
    python examples/finetune_tunix.py --method qlora --devices 4 --accumulate 2
    python examples/finetune_tunix.py --output-dir out --steps 8     # saves,
    python examples/finetune_tunix.py --output-dir out --steps 16    # and goes on
    python examples/finetune_tunix.py --optimizer adamw    # Optax, to compare
    python examples/finetune_tunix.py --method grpo        # all parameters, by rewards

Without `--checkpoint` the model is a small Llama of random weights, and a token is a
byte. With a folder of Hugging Face it is the model that its `config.json` describes:

    python examples/finetune_tunix.py --checkpoint Qwen3-0.6B

What Tunix does not compute is refused. Tunix 0.1.7 takes a `rope_theta` of 1e6 for
Llama 3, Mistral and Qwen 3, and does not scale rotary embeddings: Llama 3's checkpoints
would be other models. `finetune_hf` computes them as transformers does.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
import transformers
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.models import naming
from tunix.models.dummy_model_creator import create_dummy_model
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import rl_cluster
from tunix.rl import trainer as rl_trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import checkpoint_manager as manager
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import paged_optax as po
from paged_optax.planning.checkpoint import checkpoint_shapes

#: Wide enough that most adapters of rank 16 have the 4096 values of eight-bit moments.
TINY = dataclasses.replace(
    ModelConfig.llama3p2_1b(),
    **{"num_layers": 1, "vocab_size": 256, "embed_dim": 256, "hidden_dim": 512},
    **{"num_heads": 4, "head_dim": 64, "num_kv_heads": 2, "weight_tying": False},
)
OPTIMIZERS = {
    "adamw": optax.adamw,
    "paged_adamw": functools.partial(po.paged_adamw, min_paged_size=0),
    # A tiny model's moments are paged too.
    "paged_adamw_8bit": functools.partial(po.paged_adamw_8bit, min_paged_size=0),
}


# --- Tunix, with moments on the host -------------------------------------------


class HostCheckpoints(manager.CheckpointManager):
    """Tunix's checkpoints; a restore leaves arrays in the memory that they are in."""

    def maybe_restore(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer | None = None,
        step: int | None = None,
        restore_only_lora_params: bool = False,
    ) -> tuple[int, dict[str, object]]:
        restore = super().maybe_restore
        step, metadata = restore(model, None, step, restore_only_lora_params)
        if step and optimizer is not None:
            state = nnx.state(optimizer, nnx.optimizer.OptState)
            whole = jax.tree.leaves(nnx.state(model))[0].sharding
            if isinstance(whole, NamedSharding):  # counts go to all of its devices
                whole = NamedSharding(whole.mesh, PartitionSpec())
            place = lambda x: {"sharding": x.sharding if x.ndim else whole}
            shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, **place(x))
            item = jax.tree.map(shape, state)
            args = ocp.checkpoint_utils.construct_restore_args(item)
            args = ocp.args.PyTreeRestore(item, restore_args=args)
            args = ocp.args.Composite(optimizer_state=args)
            found = self._checkpoint_manager.restore(step, args=args)
            nnx.update(optimizer, found.optimizer_state)
        return step, metadata


class Paged:
    """A trainer of Tunix whose moments stay in host memory. For google-tunix 0.1.7.

    Three places in Tunix know one memory only. Changed there as said here, they would
    make this class unnecessary:

    1. `CheckpointManager.maybe_restore` restores into concrete arrays, which Orbax
       gives back typed as device memory, and on a mesh by `nnx.get_named_sharding`,
       which names no memory, and does not fit moments of eight bits, whose arrays have
       other axes than their parameter. Upstream: `maybe_restore` of `HostCheckpoints`,
       by a `NamedSharding` on one device too, from which Orbax types arrays rightly.
    2. `PeftTrainer.__init__` wraps the optimizer in `optax.MultiSteps`. It selects
       between old and new moments in every micro-step, which XLA cannot in host memory
       without copies. Upstream: leave an optimizer that is an `optax.MultiSteps`, as
       `paged_optax.MultiSteps` is, as it is.
    3. `PeftTrainer._shard_optimizer` constrains the state to the `PartitionSpec`s of
       `nnx.get_partition_spec`, which move all moments to the devices. Upstream: leave
       arrays that have a `NamedSharding` of the mesh where they are.

    Its arguments are Tunix's; the optimizer is of `paged_optax`, alone or in a chain.
    """

    def __init__(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        training_config: TrainingConfig,
        **options: object,
    ):
        # Tunix restores while it is constructed, and is given no manager.
        with mock.patch.object(manager, "CheckpointManager", HostCheckpoints):
            super().__init__(model, optimizer, training_config, **options)
        if (every := training_config.gradient_accumulation_steps) is not None:
            self.optimizer.tx = po.MultiSteps(optimizer, every)
        self._shard_optimizer()

    def _shard_optimizer(self, mesh: Mesh | None = None) -> None:
        """Has every array where `init` puts it, and typed so."""
        params = nnx.state(self.model, self.optimizer.wrt)
        state = po.place_state(self.optimizer.tx, self.optimizer.opt_state, params)
        self.optimizer.opt_state = nnx.data(state)


class PagedPeftTrainer(Paged, PeftTrainer):
    """Tunix's trainer of given tokens."""


class PagedActor(Paged, rl_trainer.Trainer):
    """Tunix's trainer within reinforcement learning, which `RLCluster` makes.

    Tunix's cluster then samples while the moments are on the host: what they would
    take of the device is left for the sampler's cache.
    """


# --- A checkpoint of Hugging Face ----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """Where Tunix computes the models of a `model_type`.

    Attributes:
      package: In `tunix.models`.
      tied: The field of its `ModelConfig` that ties the embedding to the output.
      rope_theta: The only one that it computes, whatever `ModelConfig` says; None: any.
    """

    package: str
    tied: str = "use_tied_embedding"
    rope_theta: float | None = 1e6


FAMILIES = {
    "llama": Family("llama3", tied="weight_tying"),
    "mistral": Family("llama3", tied="weight_tying"),
    "qwen2": Family("qwen2", rope_theta=None),
    "qwen3": Family("qwen3"),
}
#: The only values that Tunix computes, of fields that `config.json` may have.
COMPUTED = {
    "attention_bias": False,
    "attention_dropout": 0,
    "auto_map": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "quantization_config": None,
    "sliding_window": None,
}
DTYPES = (None, "float32", "bfloat16", "float16")


def read_config(folder: pathlib.Path) -> dict[str, object]:
    """The fields of a folder's `config.json`, and the defaults of transformers.

    Raises:
      ValueError: If Tunix computes another model; it names each field and its value.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file: it says what the weights are of.")
    given = json.loads(path.read_text())
    kind = given.get("model_type")
    if kind not in [*FAMILIES]:
        raise ValueError(
            f"{str(path)!r}: model_type is {kind!r}, not one of {', '.join(FAMILIES)}."
        )
    dtypes = given.pop("dtype", None), given.pop("torch_dtype", None)
    config = given | transformers.AutoConfig.for_model(**given).to_dict()
    wrong = {
        name: f"{config[name]!r}, not {value!r}"
        for name, value in COMPUTED.items()
        if config.get(name, value) != value
    }
    # Since transformers 5, `rope_parameters` has what two fields had.
    rope = {"rope_theta": config.get("rope_theta", 1e4), "rope_type": "default"}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    config["rope_theta"] = theta = rope.pop("rope_theta")
    only = FAMILIES[kind].rope_theta or theta
    if theta != only:
        wrong["rope_theta"] = f"{theta!r}, not {only!r}"
    if any(x != "default" for x in rope.values()):
        name = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
        wrong[name] = f"{rope!r}, not rope_type 'default' alone"
    if {*(config.get("layer_types") or ())} - {"full_attention"}:
        wrong["layer_types"] = f"{config['layer_types']!r}, not 'full_attention' alone"
    if not all(x.endswith("ForCausalLM") for x in config.get("architectures") or ()):
        wrong["architectures"] = f"{config['architectures']!r}, not ...ForCausalLM"
    config["dtype"] = dtype = dtypes[0] if dtypes[0] is not None else dtypes[1]
    if dtype not in DTYPES:
        wrong["dtype"] = f"{dtype!r}, not one of {DTYPES}"
    wrong |= {x: f"{given[x]!r}, not absent" for x in given if "expert" in x}
    if wrong:
        raise ValueError(
            f"{str(path)!r} describes a model that Tunix 0.1.7 does not compute: "
            + "; ".join(f"{name} is {values}" for name, values in wrong.items())
            + ". Take a checkpoint without these, such as Qwen3-0.6B."
        )
    return config


def load(folder: pathlib.Path, name: str | None, mesh: Mesh | None) -> nnx.Module:
    """The model that a folder's `config.json` describes, with its weights."""
    config = read_config(folder)
    family = FAMILIES[str(config["model_type"])]
    package = family.package
    if name and naming.ModelNaming(model_name=name).model_config_category != package:
        raise ValueError(
            f"--model {name!r} is no {config['model_type']}, which {str(folder)!r} is."
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "embed_dim": hidden,
        "hidden_dim": config["intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "num_kv_heads": config["num_key_value_heads"],
        "rope_theta": config["rope_theta"],
        "norm_eps": config["rms_norm_eps"],
        family.tied: config["tie_word_embeddings"],
    }
    stored = checkpoint_shapes(folder)
    dtypes = {str(x.dtype) for x in stored.values()}
    if len(dtypes) > 1 or not dtypes < {*DTYPES}:
        raise ValueError(
            f"{str(folder)!r} holds tensors of {', '.join(sorted(dtypes))}. Tunix reads"
            " a file as if all were of its first tensor's dtype: store them in one."
        )
    module = importlib.import_module(f"tunix.models.{package}.model")
    params = importlib.import_module(f"tunix.models.{package}.params")
    model = params.create_model_from_safe_tensors(
        str(folder),
        module.ModelConfig(**sizes),
        mesh,
        jnp.dtype(config["dtype"] or min(dtypes)),
    )
    # Tunix leaves out what it has no place for; of these, transformers does too.
    aside = ("rotary_emb.inv_freq",)
    if config["tie_word_embeddings"]:
        aside += ("lm_head.weight",)
    values = sum(x.size for name, x in stored.items() if not name.endswith(aside))
    placed = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if values != placed:
        raise ValueError(
            f"{str(folder)!r} stores {values} values, and the model of its config.json"
            f" has {placed}."
        )
    return model


# --- The model and the text ----------------------------------------------------


def new_model(args: argparse.Namespace, mesh: Mesh | None) -> nnx.Module:
    """The model of a checkpoint, or a random one; with adapters, if asked for."""
    if args.checkpoint:
        model = load(pathlib.Path(args.checkpoint), args.model, mesh)
    else:  # Given the mesh, Tunix draws other values for each copy of an array.
        model = create_dummy_model(Llama3, TINY, random_seed=args.seed, scale=0.1)
    if args.method == "qlora" and not isinstance(model, Llama3):
        raise ValueError(
            f"--method qlora: Tunix's {type(model).__name__} casts its weights, which"
            " Qwix does not do with those in four bits: use --method lora."
        )
    if args.method in ("lora", "qlora"):
        nf4 = {"weight_qtype": "nf4", "tile_size": 64}
        provider = qwix.LoraProvider(
            module_path=".*(q_proj|k_proj|v_proj|gate_proj|up_proj|down_proj)",
            rank=args.rank,
            alpha=2 * args.rank,
            **(nf4 if args.method == "qlora" else {}),
        )
        model = qwix.apply_lora_to_model(
            model, provider, rngs=nnx.Rngs(args.seed), **model.get_model_input()
        )
    if mesh is not None:  # what is new is divided as the model says
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
    return model


def manual() -> str:
    """Python's reference manual."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def batches(args: argparse.Namespace) -> Iterator[TrainingInput]:
    """Windows of the manual, always the same for the same arguments."""
    text = manual()
    if args.checkpoint:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
        tokens = np.asarray(tokenizer.encode(text), np.int32)
    else:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    random = np.random.default_rng(args.seed)
    for _ in range(args.steps * args.accumulate):
        starts = random.integers(len(tokens) - args.length, size=(args.batch, 1))
        window = tokens[starts + np.arange(args.length)]
        yield TrainingInput(input_tokens=window, input_mask=np.ones_like(window, bool))


def model_input(batch: TrainingInput) -> dict[str, jax.Array]:
    """What Tunix's loss function takes, of what its training data are."""
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


# --- Reinforcement learning ----------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes."""

    pad_id, bos_id, eos_id = (staticmethod(lambda x=x: x) for x in (0, 1, 2))

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return bytes(tokens).decode("latin1")


def letters(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A toy reward: the share of letters in a completion."""
    return [sum(map(str.isalpha, x)) / max(1, len(x)) for x in completions]


def prompts(args: argparse.Namespace) -> Iterator[dict[str, list[str]]]:
    """Windows of the manual: those of an update."""
    text, random = manual(), np.random.default_rng(args.seed)
    for _ in range(args.steps):
        starts = random.integers(
            len(text) - args.length, size=args.batch * args.accumulate
        )
        yield {"prompts": [text[x : x + args.length - 1] for x in starts]}


def new_learner(
    args: argparse.Namespace, optimizer: optax.GradientTransformation, mesh: Mesh
) -> GRPOLearner:
    """Tunix's GRPO: two completions of each prompt, against the model of the start."""
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT, rl_cluster.Role.REFERENCE
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer,
            mini_batch_size=args.batch * args.accumulate,
            train_micro_batch_size=args.batch,
            **training_options(args),
        ),
        rollout_config=RolloutConfig(
            max_prompt_length=args.length,
            max_tokens_to_generate=args.length,
            kv_cache_size=3 * args.length,
            seed=args.seed,
        ),
    )
    tokenizer = Bytes()
    if args.checkpoint:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    kind = PagedActor if args.optimizer.startswith("paged") else rl_trainer.Trainer
    with mock.patch.object(rl_trainer, "Trainer", kind):
        cluster = rl_cluster.RLCluster(
            actor=new_model(args, mesh),
            reference=new_model(args, mesh),
            tokenizer=tokenizer,
            cluster_config=config,
        )
    return GRPOLearner(cluster, GRPOConfig(), letters)


# --- The program ---------------------------------------------------------------


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=defaults)
    add = parser.add_argument
    add("--method", choices=("full", "lora", "qlora", "grpo"), default="lora")
    add("--optimizer", choices=OPTIMIZERS, default="paged_adamw_8bit")
    add("--devices", type=int, choices=(1, 4), default=1, help="4: a mesh of 2 x 2")
    add("--steps", type=int, default=8, help="updates, in all")
    add("--accumulate", type=int, default=1, help="batches of an update")
    add("--batch", type=int, default=8, help="sequences of a batch")
    add("--length", type=int, default=64, help="tokens of a sequence")
    add("--rank", type=int, default=16, help="of the adapters")
    add("--learning-rate", type=float, default=1e-3, help="constant")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--checkpoint", help="a folder: config.json, safetensors, their tokenizer")
    add("--model", help="Tunix's name of the checkpoint's: its family is checked")
    add("--output-dir", type=pathlib.Path, help="saves there, and resumes from there")
    return parser.parse_args(argv)


def training_options(args: argparse.Namespace) -> dict[str, object]:
    """What all of Tunix's trainers are given."""
    return {
        "eval_every_n_steps": args.steps,
        "max_steps": args.steps,
        "checkpoint_root_directory": args.output_dir and str(args.output_dir.resolve()),
        "pbar_description": None,
    }


def losses_of(trainer: PeftTrainer) -> np.ndarray:
    """The loss of each update of this run."""
    log, name = trainer.metrics_logger, (trainer.metrics_prefix, "loss", "train")
    return log.get_metric_history(*name) if log.metric_exists(*name) else np.zeros(0)


def main(argv: list[str] | None = None) -> PeftTrainer:
    """Trains, and says what happened. Returns the trainer."""
    args = parse_arguments(argv)
    if args.devices > 1:
        with contextlib.suppress(RuntimeError):  # JAX has started already
            jax.config.update("jax_num_cpu_devices", args.devices)
    mesh, axes = None, (AxisType.Auto,) * 2
    if args.devices > 1 or args.method == "grpo":  # whose roles have meshes
        shape = (2, 2) if args.devices > 1 else (1, 1)
        devices = jax.devices()[: args.devices]
        mesh = jax.make_mesh(shape, ("fsdp", "tp"), axes, devices=devices)
    with mesh or contextlib.nullcontext():
        optimizer = OPTIMIZERS[args.optimizer](args.learning_rate)
        if args.method == "grpo":
            learner = new_learner(args, optimizer, mesh)
            trainer, data = learner.rl_cluster.actor_trainer, prompts(args)
        else:
            paged = args.optimizer.startswith("paged")
            kind = PagedPeftTrainer if paged else PeftTrainer
            every = args.accumulate if args.accumulate > 1 else None
            config = training_options(args) | {"gradient_accumulation_steps": every}
            config = TrainingConfig(**config)
            learner = trainer = kind(new_model(args, mesh), optimizer, config)
            trainer, data = trainer.with_gen_model_input_fn(model_input), batches(args)
        print(f"{args.method}, {args.optimizer}, after step {trainer.train_steps}")
        learner.train(data)
    print("losses:", " ".join(f"{loss:.4f}" for loss in losses_of(trainer)))
    for name in ("model", "optimizer"):
        state = nnx.state(getattr(trainer, name))
        sizes = po.device_bytes(state) / 2**20, po.host_bytes(state) / 2**20
        print(f"{name}: {sizes[0]:.2f} MiB on the device, {sizes[1]:.2f} on the host")
    return trainer


if __name__ == "__main__":
    main()
