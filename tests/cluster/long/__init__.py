"""Tests on a Kubernetes node that take too long for each change: they run before each release.

`make test-cluster-long` runs them, and writes their results into docs/reliability.md.
"""
