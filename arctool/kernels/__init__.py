"""How fast: implementations of the operations that `quant` defines, one folder per backend."""
