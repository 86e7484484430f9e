"""The CSI node plugin: a process of its own, which kubelet asks, and which asks the front."""
