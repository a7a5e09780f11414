"""Averaging of gradients over ranks during training, with residuals, policies and checkpoints."""
