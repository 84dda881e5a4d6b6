"""Drafters: EAGLE-3 heads, and the checkpoint formats they come in. Knows nothing of the engine."""
