"""Device memory of seven ways to fine-tune Llama-3-8B: the README's picture.

    python notebooks/memory_and_time.py            # draws the PNG from the JSON
    python notebooks/memory_and_time.py --measure  # asks XLA for the figures first

`memory_and_time.json` has a row for each way and batch, of the smallest card that holds
the program compiled for it: bytes on the device and on the host, and seconds of a step,
at least and at most. XLA's compiler says the bytes, with the options that `jit_step`
gives it. It runs on any machine with the packages of `pip install ".[test]"`, and needs
no accelerator. No card holds a program that computes something again to save memory
(`.remat`). A T4 has rows of its own: it has no tensor cores for bfloat16.

The seconds are those of a model of the compiled schedule, at stated parts of the card's
data sheet and with assumed overheads (`tests/helpers/step_model.py`). Nobody measured
them.
"""

import argparse
import functools
import itertools
import json
import math
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
FIGURES = HERE / "memory_and_time.json"
PICTURE = HERE / "memory_and_time.png"
GIB = 2**30
#: Sequences, and tokens of each. The README and the picture have the first.
BATCHES = ((8, 512), (4, 2048))
#: What a program may take of a card's memory: more JAX cannot be given.
MOST = 0.95
WAYS = (
    "resident",
    "whole tree offloaded",
    "paged",
    "layerwise",
    "layerwise, 8 bits",
    "layerwise, 8 bits, weights on host",
    "the same, embeddings on host too",
)
#: Cards without tensor cores for bfloat16.
SLOW = ("t4",)
#: Those without this package: they are hatched.
OTHERS = WAYS[:2]


def draw(figures, path):
    """Bars of device memory, a line for each card, and each way in words.

    A phone shows the picture 400 pixels wide: its text then has 10 points or more. It
    is read by words and lengths alone, without colour.

    Args:
      figures: What the JSON holds.
      path: Where the PNG goes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = shown(figures)
    figure, axes = pyplot.subplots(figsize=(4, 5.2), layout="constrained")
    write = functools.partial(
        axes.text,
        fontsize=10,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=3,
    )
    for i, row in enumerate(rows):
        size = row["device_bytes"] / GIB
        other = row["way"] in OTHERS
        axes.barh(
            i,
            size,
            height=0.42,
            color="#d9d9d9" if other else "#3b6ea5",
            edgecolor="black",
            hatch="///" if other else "",
            zorder=2,
        )
        write(0.8, i - 0.38, f"{row['way']}: {name(row['card'])}")
        text = f"{size:.1f} GiB, {span(row)} s"
        write(size + 1.5, i, text, weight="bold")
    most = max(row["device_bytes"] for row in rows) / GIB
    cards = {row["card"]: row["card_bytes"] / GIB for row in rows}
    for memory in cards.values():
        axes.axvline(memory, color="0.5", linestyle=(0, (4, 2)), linewidth=1, zorder=1)
    axes.set_xlim(0, 1.3 * max(most, *cards.values()))
    axes.set_ylim(len(rows) - 0.6, -0.75)
    axes.set_yticks([])
    ticks = [f"{name(card)}\n{memory:.0f}" for card, memory in cards.items()]
    axes.set_xticks([*cards.values()], ticks, fontsize=10)
    axes.set_xlabel(
        "GiB of device memory; lines: cards\n"
        "hatched: Optax alone\ntime: on its card, by a model, not measured",
        fontsize=10,
    )
    axes.set_title("A step of a full fine-tune of Llama-3-8B", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200, metadata={"Software": None})
    pyplot.close(figure)


def shown(figures):
    """The README's rows: one for each way."""
    first = [x for x in figures["rows"] if tuple(x["batch"]) == BATCHES[0]]
    return [x for x in first if x["card"] not in SLOW]


def name(card):
    """A card's name as people write it."""
    return card.upper().replace("RTX", "RTX ").replace("-40", " 40 GB")


def span(row):
    """The seconds of a row, at least and at most."""
    return "{:.2f}-{:.2f}".format(*row["seconds"])


def share(row):
    """Hundredths of the card's memory that a row takes."""
    return math.ceil(100 * row["device_bytes"] / row["card_bytes"])


def programs(shape):
    """What each way compiles, in bfloat16.

    Args:
      shape: Sequences, and tokens of each.

    Returns:
      Functions without arguments, by way; each gives what `helpers.aot` compiles.
    """
    import jax.numpy as jnp
    import optax

    import paged_optax as po
    from helpers import decoder
    from helpers.programs import whole_tree
    from paged_optax.planning.models import DECODERS

    class Llama(decoder.Decoder):
        def batch(self, sharding, size=shape):
            return super().batch(sharding, size)

    sizes = DECODERS["llama3-8b"]
    model = Llama(
        sizes.hidden,
        sizes.query,
        sizes.key,
        sizes.inner,
        sizes.layers,
        sizes.vocabulary,
        tied=sizes.tied,
        dtype=jnp.bfloat16,
    )
    adamw = optax.adamw(1e-5)
    paged, eight = po.paged(adamw), po.paged(adamw, codec="dynamic_int8")
    makers = (
        lambda: decoder.ordinary(model, adamw),
        lambda: decoder.ordinary(model, whole_tree(adamw)),
        lambda: decoder.ordinary(model, paged),
        lambda: decoder.layerwise(model, paged),
        lambda: decoder.layerwise(model, eight),
        lambda: decoder.layerwise(model, eight, weights_on_host=True),
        lambda: decoder.layerwise(
            model, eight, weights_on_host=True, rest_on_host=True
        ),
    )
    return dict(zip(WAYS, makers, strict=True))


def measured(way, batch, card):
    """One row, from XLA's compiler for a card."""
    import importlib.metadata

    import jax

    from helpers import aot, step_model
    from paged_optax.planning.cards import CARDS

    build = programs(batch)[way]()
    report = aot.h200(build, card=card, options=aot.options_on(card))
    plugin = importlib.metadata.version("jax-cuda13-plugin")
    return {
        "way": way,
        "batch": list(batch),
        "card": card,
        "card_bytes": CARDS[card].memory,
        "device_bytes": report.device_total,
        "host_bytes": report.host_total,
        "rematerialized": report.hlo.count(".remat"),
        "seconds": step_model.between(report.hlo, step_model.machine_of(card)),
        "source": f"jax {jax.__version__}, jax-cuda13-plugin {plugin}",
    }


def holds(row):
    """Whether the card holds its program, and nothing is computed again for that."""
    fits = row["device_bytes"] <= MOST * row["card_bytes"]
    return fits and row["rematerialized"] == 0


def held(way, batch, rows):
    """The row of the smallest card, and before it those of slow ones that are smaller.

    Cards that cannot hold it are not tried: those without room for what stays on the
    device, and those that do not hold a smaller batch.

    Args:
      way: What is compiled.
      batch: Sequences, and tokens of each.
      rows: Those known.
    """
    import jax
    import numpy as np

    from helpers import aot
    from paged_optax.planning.cards import CARDS

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    _, arguments = programs(batch)[way]()(mesh)
    stays = sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(arguments)
        if x.sharding.memory_kind == "device"
    )
    of_less = [
        row["card_bytes"]
        for row in rows
        if row["way"] == way and math.prod(row["batch"]) < math.prod(batch)
    ]
    least = max(stays / MOST, min(of_less, default=0))
    memory = {card: CARDS[card].memory for card in aot.TARGETS}
    for card in sorted(memory, key=lambda card: memory[card]):
        if memory[card] >= least:
            row = measured(way, batch, card)
            print(json.dumps(row), flush=True)
            if holds(row):
                yield row
                if card not in SLOW:
                    return


def measure(path, ways):
    """Writes rows into the JSON, each as soon as it is known.

    Args:
      path: The JSON.
      ways: Which rows; the others stay.
    """
    # They have to be there before JAX is.
    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    root = HERE.parent
    sys.path[:0] = [str(root), str(root / "tests")]
    for batch, way in itertools.product(BATCHES, ways):
        figures = json.loads(path.read_text())
        new = list(held(way, batch, figures["rows"]))
        old = (x for x in figures["rows"] if (x["way"], x["batch"]) != (way, [*batch]))
        order = lambda row: (BATCHES.index((*row["batch"],)), WAYS.index(row["way"]))
        figures["rows"] = sorted([*old, *new], key=order)
        path.write_text(json.dumps(figures, indent=2) + "\n")


def main():
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--measure",
        nargs="*",
        metavar="WAY",
        choices=WAYS,
        help=f"compile first: all, or some of {', '.join(map(repr, WAYS))}",
    )
    parser.add_argument("--figures", type=pathlib.Path, default=FIGURES)
    parser.add_argument("--picture", type=pathlib.Path, default=PICTURE)
    asked = parser.parse_args()
    if asked.measure is not None:
        measure(asked.figures, asked.measure or WAYS)
    figures = json.loads(asked.figures.read_text())
    draw(figures, asked.picture)
    print("Device GiB, host GiB, seconds, the smallest card and its share:")
    for row in figures["rows"]:
        device, host = (row[f"{x}_bytes"] / GIB for x in ("device", "host"))
        batch = "{} x {}".format(*row["batch"])
        card = f"{name(row['card'])}, {share(row)}%"
        print(f"{row['way']}, {batch}: {device:.1f}, {host:.1f}, {span(row)}, {card}")
    print(f"Wrote {asked.picture}")


if __name__ == "__main__":
    main()
