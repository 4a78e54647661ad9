"""Compiled steps: `jit_step` pins and checks donations, `memory_report` counts bytes.

`arguments` says where each of a step's arguments lives and whether it can be donated,
`host_arithmetic` finds what a step computes on arrays in host memory, `hlo` reads the
text of a compiled program.
"""
