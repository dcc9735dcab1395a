"""Built-in schedulers, each a module registered under the entry-point group `rollstock.scheduler`."""
