"""New plugins: a package for any kind that installs, passes its kit and trains, at once.

For `rollstock new plugin KIND NAME`, and for programs. The plugins themselves are in `templates/`, one folder a kind:
each is a small working one, a place to start from.
"""

from rollstock.scaffold.package import new_plugin

__all__ = ["new_plugin"]
