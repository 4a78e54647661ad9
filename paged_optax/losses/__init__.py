"""`linear_cross_entropy`: cross-entropy without its logits in memory."""
