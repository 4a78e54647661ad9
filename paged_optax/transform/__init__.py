"""`paged` and its aliases: an Optax transformation whose state is on the host.

`init` makes the state; `residency` decides what stays on the device. `update` and
`streaming` stream it, from what `pager` knows. `codec_rules` chooses the codec of each
moment, `stored_state` says how a state is stored, `owners` finds the parameter of each
moment, `parameter_shardings` how that is divided. `gates` closes the loops of
parameters that a step skips, and `streaming` keeps their moments; which steps do, the
room `wrappers` decides. `checks` refuses bad input. `moments` describes it all for
`plan`.

.. include:: troubleshooting.md

.. include:: errors.md
"""
