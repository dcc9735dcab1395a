"""A profile of some steps of a run: where their time and memory go, by stage, by call of a worker, by operator.

For `rollstock train --profile` and `resume --profile`. `StepProfiler` is registered among the hooks of such a run and
wraps every stage; a run without the option has nothing of it. What happens inside of processes is recorded by torch's
profiler (`capture`), the controller's share is measured from outside (`spans`), and `table` says what both come to.
"""

from rollstock.profile.settings import ProfileSettings, parse_steps

__all__ = ["ProfileSettings", "parse_steps"]
