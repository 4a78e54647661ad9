"""Device memory of seven ways to fine-tune Llama-3-8B: the README's picture.

    python notebooks/memory_and_time.py            # draws the PNG from the JSON
    python notebooks/memory_and_time.py --measure  # asks XLA for the figures first

`memory_and_time.json` has a row for each way: bytes on the device and on the host, and
seconds of a step, at least and at most. XLA's compiler for an H200 says the bytes. It
runs on any machine with the packages of `pip install ".[test]"`, and needs no
accelerator. The seconds are those of a model of the compiled schedule, at stated rates
and with overheads that are assumed (`tests/helpers/step_model.py`). Nobody measured
them.
"""

import argparse
import functools
import json
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
FIGURES = HERE / "memory_and_time.json"
PICTURE = HERE / "memory_and_time.png"
GIB = 2**30
#: Memory of cards that people have, in GiB.
CARDS = (8, 16, 24, 48, 80)
WAYS = (
    "resident",
    "whole tree offloaded",
    "paged",
    "layerwise",
    "layerwise, 8 bits",
    "layerwise, 8 bits, weights on host",
    "the same, embeddings on host too",
)
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

    rows = figures["rows"]
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
        write(0.8, i - 0.38, row["way"])
        text = f"{size:.1f} GiB, {span(row)} s"
        write(size + 1.5, i, text, weight="bold")
    most = max(row["device_bytes"] for row in rows) / GIB
    for card in CARDS:
        axes.axvline(card, color="0.5", linestyle=(0, (4, 2)), linewidth=1, zorder=1)
    axes.set_xlim(0, 1.3 * max(most, CARDS[-1]))
    axes.set_ylim(len(rows) - 0.6, -0.75)
    axes.set_yticks([])
    axes.set_xticks(CARDS, [str(card) for card in CARDS], fontsize=10)
    axes.set_xlabel(
        "GiB of device memory; lines: cards\n"
        "hatched: Optax alone\ntime: by a model, not measured",
        fontsize=10,
    )
    axes.set_title("A step of a full fine-tune of Llama-3-8B", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200, metadata={"Software": None})
    pyplot.close(figure)


def span(row):
    """The seconds of a row, at least and at most."""
    return "{:.2f}-{:.2f}".format(*row["seconds"])


def programs():
    """What each way compiles: batches of 8 sequences of 512 tokens, in bfloat16.

    Returns:
      Functions without arguments, by way; each gives what `helpers.aot` compiles.
    """
    import jax.numpy as jnp
    import optax

    import paged_optax as po
    from helpers import decoder
    from helpers.programs import whole_tree
    from paged_optax.planning.shapes.decoder import DECODERS

    class Llama(decoder.Decoder):
        def batch(self, sharding, size=(8, 512)):
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


def measured(way):
    """One row, from XLA's compiler for an H200."""
    import importlib.metadata

    import jax

    from helpers import aot, step_model

    report = aot.h200(programs()[way]())
    plugin = importlib.metadata.version("jax-cuda13-plugin")
    return {
        "way": way,
        "device_bytes": report.device_total,
        "host_bytes": report.host_total,
        "seconds": step_model.between(report.hlo, step_model.H200),
        "source": f"XLA:GPU for an H200, jax {jax.__version__},"
        f" jax-cuda13-plugin {plugin}",
    }


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
    for way in ways:
        row = measured(way)
        print(json.dumps(row))
        figures = json.loads(path.read_text())
        known = {x["way"]: x for x in figures["rows"]} | {way: row}
        figures["rows"] = [known[x] for x in WAYS if x in known]
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
    print("Device GiB, host GiB, seconds:")
    for row in figures["rows"]:
        device, host = (row[f"{x}_bytes"] / GIB for x in ("device", "host"))
        print(f"{row['way']}: {device:.1f}, {host:.1f}, {span(row)}")
    print(f"Wrote {asked.picture}")


if __name__ == "__main__":
    main()
