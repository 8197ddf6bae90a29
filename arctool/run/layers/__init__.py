"""What a model's layers are: plain torch over whole sequences, x f32 [tokens, width], one layer a file.

This is the definition that calibration runs and that the compiled step of an engine is compared with. No row sees another but through
attention.
"""
