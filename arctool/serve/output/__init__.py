"""From what a model writes to what a client reads: content, reasoning and tool calls; and grammars and prompts that make it write calls."""
