"""Measurements of woodbury, outside the package: `python -m benchmarks`, from the root of a checkout."""
