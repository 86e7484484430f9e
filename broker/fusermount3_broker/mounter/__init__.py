"""The mounter: joins the caller's namespaces, mounts and unmounts. The only process that uses CAP_SYS_ADMIN.

It keeps the seven capabilities of `daemon.CAPABILITIES` and gives up all others for good. It is not dumpable; it
imports little, and nothing once it serves. It receives typed records from the front, carries out each operation in a
child that it forked in advance, and refuses on its own what no configuration allows. A child joins the caller's
namespaces and gives up what it no longer needs.

Read in this order:

- The process: `daemon`, `worker_pool` (its children), `front_connection` (the conversation with the front),
  `kept_descriptors`.
- An operation: `caller_namespaces` joins the caller's `namespaces`, `mounting` or `unmounting` carries it out, with
  `invariants` (checks every plan), `filesystem` (creates the superblock), `locked_flags` (nosuid and nodev),
  `mount_tree` (attaches, detaches), `child_processes`, `superblock_creator` (in a container's pid namespace).
- Nearly all calls, which are plain: `plain_calls` start a program in C that does the same as these modules and leaves
  what is not plain to them. `programs` has the programs in C.
- The state of mounts: `mount_inspection`, `liveness_probe`, `fuse_connections`.
- Volumes: `kubelet_directory` (creates and removes them), `volume_targets`, `volume_helper` (mounts at the target),
  `eager_volumes`, `borrowed_volumes`, `block_devices`, `tombstone` (for a dead one), `volume_consumers`, `pods`.
"""
