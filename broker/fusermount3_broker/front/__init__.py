"""The front: serves callers, makes the decisions, keeps the tables, exports metrics.

It parses every request of a caller; the mounter only takes the descriptors that come with one. It has no capabilities
and runs as a user of its own where one exists. Landlock restricts it to its state directory and the files that Python
reads; seccomp keeps it from starting programs, connecting sockets and mounting (`service.sandbox`). It asks the mounter
for every privileged operation. It is a single asyncio loop and never blocks.

`decisions` contains pure functions; `tables` survive restarts. Read in this order:

- Start: `daemon` assembles the parts, `context` holds their shared state, `model` describes a mount and a volume.
- A call: `server` accepts, `peer` identifies the caller, `caller_connection` admits and answers it, `call` serves the
  request, `slots` limits the concurrent operations of the mounter, `mounter_client` talks to the mounter,
  `failure_texts` explains its failures, `connection_closing` closes the socket connections that callers leave.
- Volumes: `csi_requests` answers the plugin, `published_volumes` makes and removes volumes with `volume_operations`,
  `borrowed_volumes` gives them the filesystems of mount pods, `lent_devices` their block devices, for which
  `waiting_volumes` wait, `volume_call` serves calls on their sockets, `restored_containers` has the
  containers of a pod looked at after a program has come back, `unmounted_volumes` after one has unmounted, both by
  `volume_tasks`.
- The state of mounts: `mount_watch` watches all mounts, `serving_processes` knows which process serves which mount,
  `connection_survey` queries the state of FUSE connections, `mount_states` concludes live, dead or hung, `dead_mounts`
  removes dead mounts, `hung_connections` aborts FUSE connections, `restore` recognizes mounts of an earlier broker.
- Deferred and failed writes to the tables: `deferred_writes`.
- For administrators: `control_socket`, `http_endpoint`, `metrics` with `process_usage`, `health`.
"""
