"""The controller: what runs FUSE programs for the volumes of users, as templates of administrators say.

It decides about objects of Kubernetes and is no part of the broker: it runs elsewhere, and calls nothing on a node. Its
libraries are the extra `[controller]` of the package, so no node installs them.

Read `volume_templates` first: what an administrator writes; then its parts: `template_parameters` (what users may say),
`provisioning_fields` (how volumes are created and deleted), `pod_rules` (what the pods of a template may be),
`expressions` (Jinja in its strings), `template_expressions` (what these are about), `label_selectors` (for which
namespaces it is) and `quantities` (such as 1Gi). `served_volumes` finds the
volumes of a pod that name a template, `rendering` makes of it a container or a pod, and `injection` puts the container
into the user's pod, as `pod_annotations` says.

Volumes that pods share have pods of their own. `shared_volumes` finds out which pods have such volumes, and which of
these are the same; `wanted_mount_pods` says what has to run for them, `mount_pod_steps` what to do so that it does, and
`mount_pods` what a mount pod is when it is created, and when it is found again.

Volumes that are created for claims have an object of their own. `claims` says which claims ask for one, `pod_volumes`
what is kept of it, and what its pods and its PersistentVolume are; `run_results` what such a pod has said, and
`pod_volume_steps` what to do next. `held_templates` keeps a template as long as it has volumes.

`offline` and, for volumes of claims, `offline_volumes` do that with objects in files, which `manifests` reads and
writes; `admission` with a pod that the API server is about to create; `new_template` writes a template to begin with.
`faults` says what is wrong with a manifest, by field. `serving_certificates` says what certificates the webhook needs,
and makes them. All of these are pure.

`daemon` is the process that acts on a cluster: `webhook` hears the API server, `cluster_cache` knows the objects that
volumes refer to and, as `kept_pods` and `packing` say, pods. `mount_pod_keeper` keeps the mount pods and writes
`mount_pod_events`: node by node, as `node_index` finds what concerns a node, and when `look_queue` says.
`pod_volume_keeper` keeps the volumes of claims; both have the `event_writer` write `events`. `api_errors` has those of
the API server that are no failure. `leader_election` has one replica do so at a time, as `election` decides.
`certificate_keeper` keeps the certificates, `controller_metrics` counts. `cli` has the commands.
"""
