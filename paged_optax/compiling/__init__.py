"""Compiled steps: `jit_step` pins and checks donations, `memory_report` counts bytes.

`host_arithmetic` finds what a step computes on arrays in host memory, `hlo` and
`computations` read the text of a compiled program, `runtime_counts` counts what
XLA:GPU's runtime does with it.
"""
