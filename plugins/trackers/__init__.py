"""Built-in trackers, each a module registered under the entry-point group `rollstock.tracker`."""
