"""The sampler's room: what a request may ask (`params`), what is remembered for a row (`state`), and one pass from logits to tokens."""
