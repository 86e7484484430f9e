"""The front's decisions, as pure functions: no files, no sockets, no clock.

`policy` turns a request, the kernel's facts and the configuration into a plan or a refusal. `limits` determines which
account pays for a caller and how much an account may use; `subordinate_ids` determines the owner of a subordinate uid.
"""
