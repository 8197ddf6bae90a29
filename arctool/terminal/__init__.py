"""What the command line shows: progress, tables, the chat loop, the doctor. Stands on all rooms; nothing stands on it but `cli`."""
