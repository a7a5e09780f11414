"""Gradients averaged over ranks in training: one step after the other, with residuals, policies and checkpoints."""
