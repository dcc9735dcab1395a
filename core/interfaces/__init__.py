"""What each kind of plugin promises, one file a kind; `rollstock.hookspecs` says how its provider is found."""
