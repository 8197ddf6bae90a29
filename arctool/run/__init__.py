"""The engine: a model that runs, sequences that share it, text that comes out. Stands on `quant`, `uqff` and `kernels`."""
