"""A model as one program of CPU kernels: its layers put in order as kernels over shared buffers, and what changes from step to step."""
