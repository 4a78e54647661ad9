"""`paged` and its aliases: Optax transformations with their state on the host.

`init` makes the state. `update` traces a step as one program a leaf, and `groups`
collects the leaves that share a loop. `paged_transformation` has the steps common to
both. `state_layout` describes the storage of a state and chooses the leaves that stay
on the device, `codec_rules` chooses the codec of each moment, and `trees` finds its
parameter. `parameter_shardings` finds the sharding of a parameter. `context` has
ambient options, visitors for traces of types, and the gates that skip parameters;
`paged_optax.step_skipping` decides which. `precision` and `remainders` keep master
weights. `checks` raises for wrong arguments. `planned_moments` describes moments for
`plan`.
"""
