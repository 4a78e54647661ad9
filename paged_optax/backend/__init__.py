"""What JAX and its backends offer, and where they differ.

`memory`: spaces, bytes, donation. `axis_types`: explicit and varying axes. `processes`:
what several say to each other. `gpu`: faults of versions, options, pinned memory.
`tiling`: how a TPU lays arrays out. `barriers`, `variables` (Flax's), `types`,
`validation` of arguments, and `text`: paths, sizes, tables. It knows nothing of
optimizers.
"""
