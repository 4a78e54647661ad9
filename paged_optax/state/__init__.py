"""Optimizer states, read and edited by the paths of parameters.

`leaves` gives each leaf its parameter and finds parameters by path. `moments` reads and
edits one parameter's moments and step count. `residency` moves moments between
memories. `restore` describes a state for a restore, and places it.
"""
