"""Built-in plugins of every kind that is neither an algorithm, a backend nor a device, a folder a kind."""
