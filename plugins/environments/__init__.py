"""Built-in environments, each a module registered under the entry-point group `rollstock.environment`."""
