"""A training run: what is trained, where its arrays are, and its step."""

import argparse
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import paged_optax as po

from .arguments import LENGTH, RATES, WAYS
from .folder import Folder, FolderError
from .methods import Full, Lora
from .model import Decoder
from .text import Documents, Row, batches, divided, documents, fitted, rows, stacked

PyTree = Any

#: XLA:GPU's limit of pinned host memory, in GiB.
POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


@dataclasses.dataclass
class Run:
    """A training run, which has read no weights yet."""

    args: argparse.Namespace
    folder: Folder
    decoder: Decoder
    method: Full | Lora
    split: po.SplitModel  # of the method's loss
    tx: optax.GradientTransformation
    train: Sequence[Row]
    held_out: Sequence[Row]
    steps: int
    mesh: jax.sharding.Mesh | None  # of several devices

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Run":
        folder = Folder.open(args.checkpoint)
        decoder = Decoder.of(folder, args.dtype or folder.dtype)
        args.length = decoder.length(args.length, LENGTH)
        args.batch *= args.gradient_accumulation
        if args.devices > jax.device_count() or args.batch % args.devices:
            raise FolderError(
                f"--devices {args.devices}: JAX has {jax.device_count()}, and they"
                f" divide a step's rows: --batch {args.batch} has to be a multiple."
            )
        if args.devices > 1 and decoder.experts:
            raise FolderError("--devices 1 is needed for experts: leave it out.")
        tokenizer = tokenizer_of(args.checkpoint)
        kept, aside = divided(documents(args.text, tokenizer), args.held_out, args.seed)
        if args.eval_text:
            aside = sum(documents(args.eval_text, tokenizer), [])
        train = rows_of(args, args.text, kept)
        held_out = rows_of(args, args.eval_text or args.text, aside) if aside else []
        decoder.refuse_tokens([*train, *held_out])
        return cls.on(args, folder, decoder, train, held_out)

    @classmethod
    def on(
        cls,
        args: argparse.Namespace,
        folder: Folder,
        decoder: Decoder,
        train: Sequence[Row],
        held_out: Sequence[Row] = (),
    ) -> "Run":
        method = Full(decoder) if args.method == "full" else Lora(decoder, args)
        steps = args.steps or -(-args.epochs * len(train) // args.batch)
        args.learning_rate = args.learning_rate or RATES[args.method]
        rate = schedule(args.lr_scheduler_type, args.learning_rate, args.warmup, steps)
        how = {"b2": 0.95, "weight_decay": args.weight_decay, "mask": decayed}
        if decoder.dtype.itemsize == 4:
            tx = po.paged_adamw(rate, **how)
        else:
            is_full, is_half = method.frozen is None, decoder.dtype == np.float16
            how["master_remainders"] = is_full and not is_half  # of bfloat16 alone
            how["master_dtype"] = "float32" if is_full and is_half else None
            tx = po.paged_adamw_8bit(rate, **how)
        row, loss, mesh = train[0], method.loss, None
        if (count := args.devices) > 1:
            how = {"axis_types": (AxisType.Auto,), "devices": jax.devices()[:count]}
            mesh = jax.make_mesh((count,), ("data",), **how)
            row, loss = stacked([row] * count), gathered(method.loss, mesh)
        split = po.split_layers(loss, method.params, row, frozen=method.frozen)
        parts = args, folder, decoder, method, split, tx, train, held_out, steps
        return cls(*parts, mesh)

    @functools.cached_property
    def way(self) -> str:
        """Where the weights are: the first way that fits, unless `--way` says."""
        if self.args.way != "auto":
            return self.args.way
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        if (memory := self.args.device_memory or limit) is None:
            return "device"  # a CPU has no limit
        fits = self.fits(memory)
        # JAX's own limit is its share already.
        most = fits.available if self.args.device_memory else limit
        needed = {way: self.needed(fits, way) for way in WAYS}
        for way, size in needed.items():
            if size < most:
                return way
        least, most = map(in_units, (min(needed.values()), most))
        raise FolderError(
            f"no way fits: the least takes {least} of the device, and JAX takes {most}."
            " Give less --batch or --length, or --method qlora."
        )

    def fits(self, memory: int | str) -> po.Footprints:
        return po.what_fits(
            self.decoder.shapes,
            None if self.method.frozen is None else optax.sgd(1.0),
            device_memory=memory,
            codec="dynamic_int8" if self.decoder.dtype.itemsize == 2 else None,
            devices=self.args.devices,
            batch=self.args.devices,
            length=self.args.length,
            heads=self.decoder.config["num_attention_heads"],
            fused_head=True,
        )

    def needed(self, fits: po.Footprints, way: str) -> int:
        """Counts the bytes of the device that a way takes."""
        config, shapes = self.decoder.config, self.decoder.shapes
        # Rows go through a layer one by one, and all their inputs are kept.
        row = self.args.length * config["hidden_size"] * self.decoder.dtype.itemsize
        count = self.args.batch // self.args.devices - 1
        kept = count * config["num_hidden_layers"] * row
        found = next(x for x in fits if without_codec(x.way) == WAYS[way][1])
        if self.method.frozen is None:
            return found.device + kept
        # Its weights may be codes, its head has no gradient, and there are adapters.
        head = (shapes.lm_head or shapes.model.embed_tokens).weight
        there = placed_bytes(self.placed(way, self.method.frozen), on_host=False)
        if self.mesh is None:  # several devices gather the head
            there -= head.size * head.dtype.itemsize
        adapters = placed_bytes(self.trained(self.method.params), on_host=False)
        return found.device + kept + there + adapters - found.parameters

    def placed(self, way: str, weights: PyTree) -> PyTree:
        """Stacks the decoder's weights, or their shapes, where a way has them."""
        is_full = self.method.frozen is None
        stack = self.split.stack if is_full else self.split.stack_frozen
        stack = functools.partial(stack, min_size=self.args.min_size)
        return self._divided(stack, WAYS[way][0], weights)

    def trained(self, params: PyTree) -> PyTree:
        """Stacks what is trained, or its shapes; adapters are on the device."""
        if self.method.frozen is None:
            return self.placed(self.way, params)
        return self._divided(self.split.stack, False, params)

    def _divided(
        self, stack: Callable[..., PyTree], on_host: bool | str, weights: PyTree
    ) -> PyTree:
        if self.mesh is None:
            array = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
            return jax.tree.map(array, stack(weights, on_host=on_host))
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        placed = jax.tree.leaves(stack(jax.tree.map(shape, weights), on_host=on_host))
        leaves, structure = jax.tree.flatten(stack(weights))
        places = po.fully_sharded(structure.unflatten(placed), self.mesh)
        for n, place in enumerate(jax.tree.leaves(places)):
            if _is_away(placed[n]):
                place = place.with_memory_kind("pinned_host")
            x, leaves[n] = leaves[n], None  # its memory is free once it is placed
            typed = isinstance(x, jax.ShapeDtypeStruct) and x.update(sharding=place)
            leaves[n] = typed or jax.device_put(x, place)
        return structure.unflatten(leaves)

    def frozen_shapes(self) -> tuple[PyTree, ...]:
        frozen = () if self.method.frozen is None else (self.method.frozen,)
        return tuple(self.placed(self.way, x) for x in frozen)

    @functools.cached_property
    def frozen(self) -> tuple[PyTree, ...]:
        """Frozen weights, as the step takes them."""
        if not isinstance(self.method, Lora):
            return ()
        return (self.placed(self.way, self.method.read_frozen(self.folder)),)

    def carry(self) -> tuple[PyTree, ...]:
        """Returns parameters, moments and workspace, from the folder's weights."""
        return self._carry(self.trained(self.method.first(self.folder)))

    def _carry(self, params: PyTree) -> tuple[PyTree, ...]:
        workspace = self.split.workspace(params, host_dtype="float32")
        return params, self.split.init(self.tx, params), workspace

    def target(self) -> tuple[PyTree, ...]:
        """Returns the shapes of `carry`, and where its arrays belong."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if self.mesh is not None:
            device = NamedSharding(self.mesh, PartitionSpec())
        placed = lambda x: x if x.sharding else x.update(sharding=device)
        params = jax.tree.map(placed, self.trained(self.method.params))
        params, state, workspace = self._carry(params)
        return params, state, po.abstract_state(workspace, params)

    def host_bytes(self) -> int:
        return placed_bytes((self.target(), self.frozen_shapes()), on_host=True)

    def refuse_small_host(self, needed: int) -> None:
        gigabytes = pinned_gigabytes()
        if needed > gigabytes << 30:
            raise FolderError(
                f"--way {self.way} takes {needed / 2**30:.0f} GiB of host memory, and"
                f" {gigabytes} may be pinned here: try --method lora, or qlora."
            )

    def step(self, carry: tuple[PyTree, ...]) -> Callable[..., Any]:
        """Compiles the step: carry and batch to the next carry and its output."""
        how = {"max_norm": self.args.max_norm, "accumulate": True}
        run = po.layerwise_step(self.split, self.tx, **how)
        given = next(self.batches()), *self.frozen
        return po.jit_step(run, *carry, *given, donate_argnums=(0, 1, 2))

    @functools.cached_property
    def loss(self) -> Callable[..., jax.Array]:
        return jax.jit(self.split.loss)

    def evaluated(self, params: PyTree, found: Sequence[Row]) -> float:
        """Computes the mean loss of rows over their tokens."""
        count = self.args.devices
        blank = {name: 0 * x for name, x in found[0].items()}
        found = [*found, *[blank] * (-len(found) % count)]
        groups = [found[n : n + count] for n in range(0, len(found), count)]
        weights = [sum(float(row["weights"].sum()) for row in x) for x in groups]
        given = (self.on_devices(stacked(x), 0) for x in groups)
        losses = [float(self.loss(params, *self.frozen, x)) for x in given]
        return float(np.average(losses, weights=weights))

    def compared(self, params: PyTree) -> str:
        """Describes the loss of QLoRA's adapters on both kinds of weights."""
        found = self.held_out or self.train[:8]
        text = f"loss of {len(found)} rows: {self.evaluated(params, found):.4f} in NF4"
        del self.frozen
        args = argparse.Namespace(**vars(self.args) | {"method": "lora", "way": "auto"})
        own = Run.on(args, self.folder, self.decoder, found)
        try:
            own.refuse_small_host(placed_bytes(own.frozen_shapes(), on_host=True))
            loss = own.evaluated(params, found)
            return f"{text}, {loss:.4f} beside the folder's own weights"
        except (FolderError, jax.errors.JaxRuntimeError) as error:  # of no memory
            first = str(error).splitlines()[0]
            return f"{text}; not computed beside the folder's own weights: {first}"

    def on_devices(self, rows: Row, axis: int) -> Row:
        """Divides rows over the devices, along an axis; one has rows one by one."""
        if self.mesh is None:
            return rows if axis else {name: x[0] for name, x in rows.items()}
        place = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "data"))
        lead = *[-1] * axis, self.args.devices
        put = lambda x: jax.device_put(x.reshape(*lead, *x.shape[1:]), place)
        return {name: put(x) for name, x in rows.items()}

    def batches(self) -> Iterator[Row]:
        found = batches(self.train, self.args.batch, self.args.seed)
        return (self.on_devices(rows, 1) for rows in found)


def gathered(
    loss: Callable[..., po.WeightedLoss], mesh: jax.sharding.Mesh
) -> Callable[..., po.WeightedLoss]:
    """Returns a loss that gathers a layer's weights, so that rows stay in place."""
    whole, key = NamedSharding(mesh, PartitionSpec()), jax.tree_util.keystr
    gather = functools.partial(jax.lax.with_sharding_constraint, shardings=whole)
    in_layer = lambda path, x: gather(x) if ".layers" in key(path) else x
    gather_all = functools.partial(jax.tree_util.tree_map_with_path, in_layer)
    return lambda *given: loss(*gather_all(given[:-1]), given[-1])


def merge(args: argparse.Namespace) -> None:
    folder = Folder.open(args.checkpoint)
    decoder = Decoder.of(folder, args.dtype or folder.dtype)
    decoder.read(folder)  # refuses what is not whole
    lora = Lora(decoder, args)
    print(f"method: {lora.name}")
    lora.save(folder, args.output, lora.first(folder))
    print(f"wrote {args.output}")


def rows_of(args: argparse.Namespace, path: pathlib.Path, read: Documents) -> list[Row]:
    fit, longer = fitted(read, args.length, args.too_long)
    if longer:
        lost, is_cut = len(read) - len(fit), args.too_long != "drop"
        cut = f"{longer - lost} cut at the {args.too_long}, " * is_cut
        why = " because nothing to learn is left" * (is_cut and lost > 0)
        print(
            f"{path}: {longer} of {len(read)} chats, or turns that the template renders"
            f" alone, have over {args.length + 1} tokens: {cut}{lost} left out{why}"
        )
    if not (found := rows(fit, args.length)):
        why = f"{path} has no row of {args.length} tokens to learn"
        raise FolderError(f"{why}: give more text, more --length, or less --held-out.")
    return found


def schedule(kind: str, rate: float, warmup: float, steps: int) -> optax.Schedule:
    """Returns a linear warmup, and a decay to 0 after the last step."""
    first = 0 if kind == "constant" else max(1, round(warmup * steps))
    # The step before the first has the rate 0.
    rest = steps + 1 - first
    after = {
        "cosine": optax.cosine_decay_schedule(rate, max(1, rest)),
        "linear": optax.linear_schedule(rate, 0.0, rest),
    }.get(kind, optax.constant_schedule(rate))
    ramp = optax.linear_schedule(0.0, rate, first)
    joined = optax.join_schedules([ramp, after], [first])
    return lambda count: joined(count + 1)


def decayed(params: PyTree) -> PyTree:
    names = lambda path: jax.tree_util.keystr(path).lower()
    decays = lambda path, _: not any(x in names(path) for x in ("norm", "bias"))
    return jax.tree_util.tree_map_with_path(decays, params)


def in_units(size: float) -> str:
    unit = min(max(int(size).bit_length() - 1, 0) // 10, 3)
    return f"{size / 1024**unit:.1f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def without_codec(way: str) -> str:
    return way.replace(", dynamic_int8", "")


def placed_bytes(tree: PyTree, *, on_host: bool) -> int:
    """Counts the bytes of leaves, or shapes, on the host, or on one device."""
    part = lambda x: x.sharding.shard_shape(x.shape) if x.sharding else x.shape
    there = (x for x in jax.tree.leaves(tree) if _is_away(x) == on_host)
    sizes = ((x.shape if on_host else part(x), x.dtype.itemsize) for x in there)
    return sum(math.prod(shape) * size for shape, size in sizes)


def _is_away(x: Any) -> bool:
    return getattr(x.sharding, "memory_kind", "") == "pinned_host"


def tokenizer_of(path: pathlib.Path) -> Any:
    from transformers import AutoTokenizer

    # From a configuration alone transformers makes a tokenizer without vocabulary.
    if not any(path.glob("tokenizer.*")) and not any(path.glob("vocab.*")):
        raise FolderError(f"{path} has no tokenizer: put tokenizer.json beside it.")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        raise FolderError(f"{path} has no readable tokenizer: {first}") from None


def pinned_gigabytes() -> int:
    """Returns the limit of pinned host memory: nine tenths of it, or that of `POOL`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(os.environ.get(POOL, max(1, 9 * memory // 10 >> 30)))
