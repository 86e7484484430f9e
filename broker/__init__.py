"""The broker: the daemon on the host that mounts for callers who may not.

It is two processes. The front (`server` and what it imports) accepts, identifies, parses and decides. The mounter
(`mounter`, which imports `plan` and `syscalls` only) is told what to do in few, small, well-typed messages, and does
it in one child an operation. docs/architecture.md has the map.
"""
