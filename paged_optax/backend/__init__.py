"""What JAX and its backends offer, and where they differ.

`platforms`: faults of XLA by version, barriers, what one platform alone computes.
`compiler_options`: what XLA must be told. `memory`: spaces, bytes, donation.
`pinned_pool`: where a GPU's host arrays are. `types`: what arrays' types tell, also of
a mesh. `processes`: what several say to each other. `tiling`: how a TPU lays arrays
out. `flax_variables` are Flax's. `validation` is of arguments, `text` has paths, sizes,
tables. `user_warnings` point at users' lines. It knows nothing of optimizers.
"""
