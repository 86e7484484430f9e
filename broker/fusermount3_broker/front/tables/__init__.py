"""The front's persistent state: tables in SQLite in its state directory.

The data in memory is authoritative; the tables are copies. `mount_table` holds live mounts, `volume_table` published
volumes; both are built on `database`. `damaged_rows` puts invalid rows aside. These modules know nothing of calls.
"""
