"""Built-in devices: the only code that names a chip."""
