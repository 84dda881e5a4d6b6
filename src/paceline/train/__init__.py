"""Training an EAGLE-3 head for any target, from conversations that the target itself makes.

Imports the models package and torch, and nothing of the server or the engine.
"""
