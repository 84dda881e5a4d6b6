"""Python's garbage collector beside a model: what starting left behind is kept, and not looked through again.

A full collection visits every object there is. The modules and compiled kernels of an engine are some
300,000, which takes as long as twenty steps (measured: 140 ms), and the step in which it falls due waits.
"""

import gc


def freeze() -> None:
    """Collect what is garbage now, and leave all else out of collections to come.

    For a process that has started what it is there for. An object that becomes garbage later is freed as ever
    unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
