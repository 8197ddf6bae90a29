"""The paged cache: who owns which block, and where keys and values lie."""
