"""Random problems against independent references: `python -m tests.fuzz.api --help`."""
