"""The commands of ``fusermount3-broker``, as an administrator types them.

They run with the rights of the user who types them; those that query a running broker need access to its control
socket, which only root has. They trust no answer of the broker: its front may be compromised.

Read `main` first: `serve` and `csi` end there in the supervisor, `device-plugin` in the device plugin. Then `options`,
`control_client` (a query to the running broker), `running_broker` (its command line), `request_ids` (which mount is
meant), `mounts` with `container_names`, `mounts_table`, `completion`, `top` and its `rates`, `live_display` (what is
shown each second), `formatting`, and `specification_file` (what `cdi generate` writes).
"""
