"""Built-in rewards, each a module registered under the entry-point group `rollstock.reward`."""
