"""What the controller costs, with nodes and pods that exist in a real API server only.

`simulation` has them: the nodes do nothing, and a task in place of their kubelets says of pods what these would say.
`measurement` measures, and `report` is what docs/performance.md has of it.
"""
