"""The unchanged loop of a user: what was seen of it, and the loss rebuilt from that."""
