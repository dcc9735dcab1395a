"""Built-in compressors, each a module registered under the entry-point group `rollstock.compressor`."""
