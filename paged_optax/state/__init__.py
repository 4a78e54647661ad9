"""A state, read and changed by the names of parameters.

`leaves` says which leaf is whose, and which parameters a path names. `moments` takes
one parameter's out and puts them back. `steps` counts, `residency` moves between
memories, `restore` describes a state and puts it in place. `bitsandbytes_entries` reads
those that bitsandbytes saved.
"""
