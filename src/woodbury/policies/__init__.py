"""Policies: how much lambda, how far along p, and whether to move at all."""
