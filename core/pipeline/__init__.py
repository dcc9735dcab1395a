"""How far generation runs ahead of training: the three modes of the config's section `pipeline`.

For the loop, whose lines are the same in all of them. `synchronous` generates when a step asks for it; `ahead` in a
thread of its own, over `rounds` of tasks, with workers that two threads call by `turns`.
"""

from rollstock.pipeline.ahead import Ahead
from rollstock.pipeline.choice import examine_pipeline, make_pipeline, sampler_is_old
from rollstock.pipeline.synchronous import Kept, Pipeline
from rollstock.pipeline.turns import SharedGroup

__all__ = ["Ahead", "Kept", "Pipeline", "SharedGroup", "examine_pipeline", "make_pipeline", "sampler_is_old"]
