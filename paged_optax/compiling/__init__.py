"""Compiled steps: `jit_step` pins and checks donations, `memory_report` counts bytes.

`host_arithmetic` finds what a step computes on arrays in host memory, `hlo` reads the
text of a compiled program.

.. include:: clients.md
"""
