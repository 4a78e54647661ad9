"""A state, read and changed by the names of parameters.

`leaves` says which leaf is whose. `moments` takes one parameter's out and puts them
back. `steps` counts, `residency` moves between memories, `abstract` and `place`
restore. `entries` finds a parameter's in what bitsandbytes saved.
"""
