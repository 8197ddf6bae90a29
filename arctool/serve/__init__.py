"""The door: HTTP in front of the engine. Protocols, limits, life cycle, metrics, the chat page."""
