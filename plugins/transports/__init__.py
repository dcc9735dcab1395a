"""Built-in transports, each a module registered under the entry-point group `rollstock.transport`."""
