"""Experiments around the optimizers: data, models, a training loop and figures from its records."""
