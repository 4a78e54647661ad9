"""What JAX and its backends offer, and where they differ.

Memory spaces and the bytes in them, what is traced, sizes as text, how a TPU lays
arrays out, donation, meshes of explicit axes, barriers, Flax's variables, what XLA:GPU
must be told (`overlap`). `versions` names what earlier versions get wrong. It knows
nothing of optimizers.
"""
