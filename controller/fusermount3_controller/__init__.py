"""The controller: what runs FUSE programs for the volumes of users, as templates of administrators say.

It decides about objects of Kubernetes and is no part of the broker: it runs elsewhere, and calls nothing on a node. Its
libraries are the extra `[controller]` of the package, so no node installs them.

All modules are pure so far: `expressions` (Jinja in the strings of a template) and `faults` (what is wrong with a
manifest, by field).
"""
