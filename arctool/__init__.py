"""arctool: bake a checkpoint to a 2-4 bit trellis artifact, prove it bit by bit, and run it."""

__version__ = "0.1.0"
