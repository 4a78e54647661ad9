"""Compiled steps: `jit_step` places and checks donations, `memory_report` counts bytes.

`arguments` names a step's leaves, `donations` finds their buffers in the program.
`host_arithmetic` finds computation on host arrays, and `overlapping` compiles with the
options that XLA:GPU needs.
"""
