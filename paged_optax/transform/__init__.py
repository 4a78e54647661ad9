"""`paged` and its aliases: an Optax transformation whose state is on the host.

`init` makes the state, `update` and `streaming` stream it; what both know is in
`paged_transformation`. `state_layout` says how a state is stored, and what of it stays
on the device. `codec_rules` chooses the codec of each moment, `trees` finds its
parameter, `parameter_shardings` how that is divided. `active_parameters` closes the
loops of parameters that a step skips, and `streaming` keeps their moments; which steps
do, the room `wrappers` decides. `checks` refuses bad input. `planned_moments` describes
it all for `plan`.
"""
