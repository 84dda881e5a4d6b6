"""Measuring: which depth pays at which load, on this machine or over HTTP, and saying so in pictures."""
