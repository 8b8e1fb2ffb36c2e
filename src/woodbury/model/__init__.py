"""What a model is, and how it is run: its layers, its passes, and rows that no layer rule gives."""
