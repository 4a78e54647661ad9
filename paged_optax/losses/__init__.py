"""`linear_cross_entropy`: cross-entropy that never materializes its logits."""
