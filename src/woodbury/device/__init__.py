"""Single numbers and recorded steps on an accelerator: the one wing that knows about CUDA."""
