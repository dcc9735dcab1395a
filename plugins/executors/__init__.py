"""Built-in executors, each a module registered under the entry-point group `rollstock.executor`."""
