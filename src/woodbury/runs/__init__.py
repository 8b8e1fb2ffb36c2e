"""What a run leaves on disk: configuration, records, checkpoints, and the report that is drawn from them."""
