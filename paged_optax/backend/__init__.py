"""JAX and its backends, independent of any optimizer.

`platforms`: XLA bugs by version, barriers. `compiler_options`: options of XLA:GPU.
`memory`: memory spaces, bytes, donation. `pinned_pool`: XLA:GPU's host memory. `types`:
array types, also on a mesh. `processes`: agreement of processes. `tiling`: layouts of
XLA:TPU. `flax_variables`: Flax NNX's variables. `validation`: checks of arguments.
`text`: paths, sizes, tables. `user_warnings`: warnings at lines of the user.
"""
