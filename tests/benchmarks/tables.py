"""The benchmarks' rows as tables, for people.

python tests/benchmarks/tables.py FILE...    # the guide's table of tokens a second
"""

import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def _range(values: list[float] | None, digits: str) -> str:
    if not values:
        return "-"
    return f"{values[0]:{digits}}-{values[1]:{digits}}"


def _verdict(row: Row) -> str:
    if row.get("within_target") is None:
        return "-"
    word = "met" if row["within_target"] else "ABOVE"
    return f"{row['target']:g} {word}"


def _mib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


#: For each part: its heading, and its columns as titles and what they show of a row.
TABLES: dict[str, tuple[str, dict[str, Callable[[Row], str]]]] = {
    "numbers": (
        "Numbers: paged against Optax on this backend",
        {
            "optimizer": lambda r: r["name"],
            "steps": lambda r: str(r["steps"]),
            "pages, most": lambda r: str(r["most_pages_a_leaf"]),
            "moments with a smaller last page": lambda r: (
                f"{r['leaves_with_a_smaller_last_page']} of {r['leaves_in_pages']}"
            ),
            "state bits differ": lambda r: (
                f"{r['state_values_that_differ']} of {r['state_values']}"
            ),
            "parameters": lambda r: (
                f"{r['parameters_that_differ']} of {r['parameters']}, "
                f"{r['most_ulps_between_parameters']} ulp"
            ),
            "worst error": lambda r: f"{r['worst_relative_error']:.1e}",
            "": lambda r: "right" if r["right"] else "WRONG",
        },
    ),
    "checks": (
        "Checks: the same numbers in every way",
        {
            "check": lambda r: r["name"],
            "worst error": lambda r: f"{r['error']:.1e}" if "error" in r else "-",
            "": lambda r: "right" if r["right"] else "WRONG",
        },
    ),
    "link": (
        "Link: inside jit, pinned host buffers (10^9 bytes a second)",
        {
            "direction": lambda r: r["name"],
            "buffer, MiB": lambda r: _mib(r["buffer_bytes"]),
            "page, MiB": lambda r: _mib(r["page_bytes"]),
            "repeats": lambda r: str(r["repeats"]),
            "range": lambda r: _range(r["gigabytes_per_second_range"], ".1f"),
            "GB/s": lambda r: f"{r['gigabytes_per_second']:.1f}",
        },
    ),
    "update": (
        "Update: gradients and state donated (ratio: median of paired turns)",
        {
            "update": lambda r: r["name"],
            "ms": lambda r: _milliseconds(r["seconds"]),
            "ratio": lambda r: "-" if r["ratio"] is None else f"{r['ratio']:.3f}",
            "quartiles": lambda r: _range(r["ratio_quartiles"], ".2f"),
            "rounds": lambda r: str(r["rounds"]),
            "target": _verdict,
            "link GB/s": lambda r: (
                f"{rate:.1f}" if (rate := r["link_gigabytes_per_second"]) else "-"
            ),
            "scratch MiB": lambda r: _mib(r["xla_scratch_bytes"]),
        },
    ),
    "tokens": (
        "Training steps of decoders (low and high: the step model's overheads)",
        {
            "step": lambda r: r["name"],
            "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
            "TFLOP/s": lambda r: f"{r['teraflops']:.1f}",
            "MFU": lambda r: "-" if r["mfu"] is None else f"{r['mfu']:.0%}",
            "ms": lambda r: _milliseconds(r["seconds"]),
            "range": lambda r: _range([1e3 * x for x in r["seconds_range"]], ",.1f"),
            "predicted": lambda r: _range(
                [1e3 * x for x in r.get("predicted", {}).get("seconds_range", ())],
                ",.1f",
            ),
            "device MiB": lambda r: _mib(r["device_bytes"]),
            "source": lambda r: r["source"],
        },
    ),
}


def shares(rows: list[Row], table: Callable[..., str]) -> str:
    """Each part of a step, in hundredths of all parts."""
    names = list(rows[0]["shares"])
    part = lambda row, name: row["shares"][name] / sum(row["shares"].values())
    cells = [[name, *(f"{part(row, name):.1%}" for row in rows)] for name in names]
    title = lambda row: row["name"].partition(": ")[2]
    return table(("part", *map(title, rows)), cells)


def speeds(rows: list[Row]) -> str:
    """The guide's table of tokens a second, of what was measured and of the model."""
    steps = [row for row in rows if row["section"] in ("tokens", "decoder")]
    model = lambda row: row["name"].partition(":")[0].replace(" ", "-")
    each = {
        model(row): row["teraflops"] / row["tokens_per_second"]
        for row in steps
        if row["section"] == "tokens"
    }
    peak = {row["card"]: row["teraflops"] / row["mfu"] for row in steps if "mfu" in row}
    head = "card", "model", "way", "micro-batches", "tokens/s", "MFU", "device, GiB", ""
    cells = []
    for row in steps:
        card = row.get("card") or row["predicted_for"]
        rate = row["tokens"] / row["seconds"]
        used = each[model(row)] * rate / peak[card]
        size = row.get("peak_device_bytes") or row["device_bytes"]
        measured = row["section"] == "decoder" or row["source"] == "measured"
        cells.append(
            (
                card.upper().replace("RTX", "RTX "),
                model(row),
                row.get("way") or row["name"].partition(": ")[2],
                str(row.get("micro_batches", 1)),
                f"{rate:,.0f}",
                f"{used:.0%}",
                f"{size / 2**30:.1f}",
                "**measured**" if measured else "model",
            )
        )
    return markdown(head, sorted(cells, key=lambda x: x[0]))


def markdown(head: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A guide's table."""
    lines = (head, ["---"] * len(head), *cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(result: dict[str, Any]) -> str:
    """Every row, and every row that could not run, as tables."""
    from paged_optax.backend.text import table

    parts = []
    for section, (heading, columns) in TABLES.items():
        rows = [row for row in result["rows"] if row["section"] == section]
        if rows:
            cells = [[cell(row) for cell in columns.values()] for row in rows]
            parts.append(f"{heading}\n\n{table(tuple(columns), cells)}")
        if profiles := [row for row in rows if "shares" in row]:
            parts.append(f"Shares of a step's time\n\n{shares(profiles, table)}")
    if result["not_run"]:
        line = "- {section}, {name}: {reason}".format_map
        parts.append("Could not run\n\n" + "\n".join(map(line, result["not_run"])))
    return "\n\n".join(parts)


def main() -> None:
    """Prints the guide's tables of the rows in files."""
    read = (json.loads(pathlib.Path(name).read_text()) for name in sys.argv[1:])
    rows = [row for found in read for row in found["rows"]]
    print(speeds(rows), shares(profiled(rows), markdown), sep="\n\n")


def profiled(rows: list[Row]) -> list[Row]:
    """The guide's steps whose shares are shown: of Llama-3-8B on an H200."""
    shown = lambda x: x["micro_batches"] != 16 and "on host" not in x["way"]
    wanted = {"card": "h200", "model": "Llama-3-8B"}
    return [x for x in rows if wanted.items() <= x.items() and shown(x)]


if __name__ == "__main__":
    main()
