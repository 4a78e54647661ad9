"""Compiled steps: `jit_step` pins and checks donations, `memory_report` counts bytes.

`arguments` says what a step is called with, `donations` where each argument lives and
whether it can be donated. `host_arithmetic` finds what a step computes on arrays in
host memory, `hlo` reads the text of a compiled program.
"""
