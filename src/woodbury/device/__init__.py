"""Single numbers and recorded steps on an accelerator."""
