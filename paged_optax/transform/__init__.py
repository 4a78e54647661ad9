"""`paged` and its aliases: an Optax transformation whose state is on the host.

`init` makes the state, `update` and `streaming` stream it. `codec_rules` says what
stores which moment, `owners` whose it is, `active` what a skipped step leaves alone,
`checks` what is refused.
"""
