"""`paged` and its aliases: an Optax transformation whose state is on the host.

`init` makes the state, `update` and `streaming` stream it. `codec_rules` chooses the
codec of each moment, `owners` finds the parameter of each moment, `active` leaves alone
what a step skips, and `checks` refuses bad input.
"""
