"""Losses that never hold what is largest in them: the logits.

`linear_cross_entropy` is the loss of a model's last, linear layer; `chunks` takes its
vocabulary apart.
"""
