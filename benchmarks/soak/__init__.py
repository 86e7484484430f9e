"""A long run under load, with faults injected at random: what was survived, what was lost.

`run` is the order of events; `scene` holds the broker and its `load`; `faults` and `disk` are the faults injected into
them; `census` finds mounts that the broker does not list; `report` judges, and writes the page.
"""
