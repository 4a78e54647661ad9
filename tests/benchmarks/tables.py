"""The benchmarks' rows as tables, for people."""

from collections.abc import Callable
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
            "peak MiB": lambda r: _mib(r["peak_device_bytes"]),
        },
    ),
    "layerwise": (
        "A training step with one layer's gradients alive (ratio: to jax.grad)",
        {
            "step": lambda r: r["name"],
            "layers": lambda r: str(r["layers"]),
            "parameters": lambda r: f"{r['parameters'] / 1e6:.1f} M",
            "ms": lambda r: _milliseconds(r["seconds"]),
            "ratio": lambda r: f"{r['ratio']:.2f}",
            "range": lambda r: _range(r["ratio_range"], ".2f"),
            "rounds": lambda r: str(r["rounds"]),
        },
    ),
    "decoder": (
        "A training step of a decoder (predicted: by the step model, at data sheets')",
        {
            "step": lambda r: r["name"],
            "parameters": lambda r: f"{r['parameters'] / 1e6:,.1f} M",
            "tokens": lambda r: str(r["tokens"]),
            "ms": lambda r: _milliseconds(r["seconds"]),
            "range": lambda r: _range([1e3 * x for x in r["seconds_range"]], ".1f"),
            "predicted": lambda r: _range(
                [1e3 * x for x in r.get("predicted_range", ())], ".1f"
            ),
            "XLA's peak MiB": lambda r: _mib(r["xla_device_bytes"]),
            "peak MiB": lambda r: _mib(r["peak_device_bytes"]),
            "last loss": lambda r: f"{r['losses'][-1]:.5f}",
        },
    ),
    "tracing": (
        "Tracing, caches cleared before each",
        {
            "update": lambda r: r["name"],
            "ms": lambda r: _milliseconds(r["seconds"]),
            "ratio": lambda r: f"{r['ratio']:.2f}",
            "range": lambda r: _range(r["ratio_range"], ".2f"),
            "repeats": lambda r: str(r["repeats"]),
            "target": _verdict,
        },
    ),
}


def show(result: dict[str, Any]) -> str:
    """Every row, and every row that could not run, as tables."""
    from paged_optax.backend.text import table

    parts = []
    for section, (heading, columns) in TABLES.items():
        rows = [row for row in result["rows"] if row["section"] == section]
        if rows:
            cells = [[cell(row) for cell in columns.values()] for row in rows]
            parts.append(f"{heading}\n\n{table(tuple(columns), cells)}")
        if section == "update":
            sources = sorted({row["peak_source"] for row in rows})
            parts += [f"Peak: {source}." for source in sources]
    if result["not_run"]:
        lines = [
            f"- {row['section']}, {row['name']}: {row['reason']}"
            for row in result["not_run"]
        ]
        parts.append("Could not run\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
