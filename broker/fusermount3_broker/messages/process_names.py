"""Names of processes in /proc (comm), for those that another process of the broker looks for."""

#: A child of the mounter that carries out an operation, and may hang; the other children only wait.
BUSY = b"fuse-operation"
