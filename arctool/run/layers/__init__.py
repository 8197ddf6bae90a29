"""One layer a file, over a flat batch of tokens: x is f32 [tokens, width], and no row can see another but through attention."""
