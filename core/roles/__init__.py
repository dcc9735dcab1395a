"""The workers of a run, one class a role: what the controller calls, wherever an executor put them.

A worker keeps no state that is not in the controller's checkpoint. The classes here are built in the process they live
in, from the resolved config alone, with a plugin manager of that process.
"""
