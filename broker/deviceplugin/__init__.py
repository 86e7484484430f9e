"""The device plugin for Kubernetes: a process of its own, which kubelet asks what a container is given."""
