"""The controller: what runs FUSE programs for the volumes of users, as templates of administrators say.

It decides about objects of Kubernetes and is no part of the broker: it runs elsewhere, and calls nothing on a node. Its
libraries are the extra `[controller]` of the package, so no node installs them.

Read `volume_templates` first: what an administrator writes; then `pod_rules` (what the pod of a template may be) and
`expressions` (Jinja in its strings). `faults` says what is wrong with a manifest, by field. All modules are pure.
"""
