"""What the text of an optimized program tells.

XLA marks buffers in host memory by the layout's memory space 5
(`xla::Layout::kHostMemorySpace`).
"""

import re

_TRANSFER = re.compile(
    r"= .*S\(5\).* (?:copy-start|async-start|dynamic-slice-start"
    r"|dynamic-update-slice-start|fusion-start)\("
)


def aliases(hlo: str) -> dict[int, int]:
    """By the numbers of donated arguments, the output that takes over each buffer."""
    header = hlo[: hlo.find("\n\n")]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry_computation", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", found[1] if found else "")
    return {int(argument): int(output or 0) for output, argument in pairs}


def transfers(hlo: str) -> int:
    """How many asynchronous copies go to or from host memory."""
    return len(_TRANSFER.findall(hlo))


def is_partitioned(hlo: str) -> bool:
    """Whether the program is of several devices."""
    return bool(re.search(r"num_partitions=(?!1\b)", hlo))
