"""Container edits: the files, the socket and /dev/fuse that a container gets so that its FUSE programs find the broker.

Nothing here is part of the broker's service. The device plugin is a process of its own, which needs no privilege except
to write in kubelet's directory of device plugins; `cdi` generates text for container engines.

Read `container_edits` first (pure: what a container gets), then `cdi`, `device_plugin` (the process) and `devices` (its
messages to kubelet). `deviceplugin_pb2` is generated from deviceplugin.proto by ``make device-plugin``.
"""
