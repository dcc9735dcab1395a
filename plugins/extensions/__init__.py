"""Built-in extensions, each a module registered under the entry-point group `rollstock.extension`."""
