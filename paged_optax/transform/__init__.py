"""`paged` and its aliases: an Optax transformation whose state is on the host.

`init` makes the state. `update` traces what a step computes of each leaf, and
`leaf_groups` runs it, like leaves in one loop. What both know is in
`paged_transformation`. `state_layout` says how a state is stored, and what of it stays
on the device. `codec_rules` chooses the codec of each moment, `trees` finds its
parameter, `parameter_shardings` how that is divided, and `moment_parts` which part of
it a device has within a `shard_map`. `gates` closes the loops of parameters that a step
skips, and `leaf_groups` keeps their moments; which steps do,
`paged_optax.step_skipping` decides. `context` is what an update is told besides its
arguments. `precision` and `remainders` keep master weights. `checks` refuses bad input,
and `process_agreement` says what several processes must have built alike.
`planned_moments` describes it all for `plan`.
"""
