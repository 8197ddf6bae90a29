"""The protocols' bodies as pydantic models. A field that is not here is refused: nothing that a client asks for is ignored in silence."""
