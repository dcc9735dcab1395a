"""Built-in algorithms, one a file, and `functional`, the mathematics that they share."""
