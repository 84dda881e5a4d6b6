"""K/V caches and the attention over them, one module for each kind of device."""
