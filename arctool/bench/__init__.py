"""Measuring: search and kernel speed, perplexity. Run by hand, never by the tests; every figure says what produced it."""
