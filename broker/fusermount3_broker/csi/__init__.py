"""The CSI node plugin: answers kubelet over gRPC, and forwards its requests to the front.

It has no capability and may access no files except those that gRPC and Python read. It may make one socket, in
kubelet's plugin directory; its uid stays. It decides nothing: it checks kubelet's requests and passes them on.

Read `plugin` first, then `volume_requests` (kubelet's possible requests, and the `volumeAttributes` of a manifest).
`csi_pb2` is generated from csi.proto by ``make csi``.
"""
