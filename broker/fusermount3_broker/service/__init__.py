"""Services that any daemon needs, whichever process it is. Nothing here depends on mounts or callers.

`configuration` has the keys with their defaults, `configuration_file` reads them, `toml_lines` finds the line of each,
`start_checks` looks for what would fail when the broker starts. `log` writes structured records, whose values
`truncation` keeps short. `listening_sockets` come from systemd or are made here, `channel` reads and writes records on
a socket in asyncio, `grpc_server` listens for kubelet. `sandbox` gives up privilege, files and system calls.
`state_directory` locks it, names the tables in it, and sets aside files that can't be one.
"""
