"""Built-in routers, each a module registered under the entry-point group `rollstock.router`."""
