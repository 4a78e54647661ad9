"""Compiled steps: `jit_step` places and checks donations, `memory_report` counts bytes.

`donations` names a step's leaves, and finds the buffers of donated ones in the program.
`host_arithmetic` finds computation on host arrays.
"""
