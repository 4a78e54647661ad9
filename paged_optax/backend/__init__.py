"""What JAX and its backends offer, and where they differ.

`xla`: faults of its versions, barriers, options, pinned memory. `memory`: spaces,
bytes, donation. `types`: what arrays' types tell, also of a mesh. `processes`: what
several say to each other. `tiling`: how a TPU lays arrays out. `variables` are Flax's.
`validation` is of arguments, `text` has paths, sizes, tables. It knows nothing of
optimizers.
"""
