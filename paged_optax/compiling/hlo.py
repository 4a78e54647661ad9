"""The text of a compiled program: aliases, transfers, partitions.

XLA marks buffers in host memory by the layout's memory space 5
(`xla::Layout::kHostMemorySpace`).
"""

import re

# A start that has host memory among its types.
_TRANSFER = re.compile(
    r"= .*S\(5\).* (?:copy-start|async-start|dynamic-slice-start"
    r"|dynamic-update-slice-start|fusion-start)\("
)


def aliases(hlo: str) -> dict[int, int]:
    """The output that reuses each donated argument, by the argument's number.

    The tokens that order effects are not counted: they precede arrays in both.
    """
    # Aliases stand before the first computation, and a blank line between them.
    header = hlo[: hlo.find("\n\n")]
    types = header.partition("entry_computation_layout={(")[2].partition(")->")[0]
    tokens = types.count("token[]")
    match = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", match[1] if match else "")
    return {int(x) - tokens: int(output or 0) - tokens for output, x in pairs}


def transfers(hlo: str) -> int:
    """The number of asynchronous copies to or from host memory."""
    return len(_TRANSFER.findall(hlo))


def is_partitioned(hlo: str) -> bool:
    """Whether the program is of several devices."""
    return bool(re.search(r"num_partitions=(?!1\b)", hlo))
