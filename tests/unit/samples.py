"""Examples that several tests share."""

from __future__ import annotations

from fusermount3_broker.front.model import Volume
from fusermount3_broker.messages.mounter import NO_GROUP

POD = "3f2c8b1e-5f0a-4f4e-9d7e-0d9c1f6a2b3c"
VOLUME = Volume(
    target=b"pods/%b/volumes/kubernetes.io~csi/data/mount" % POD.encode(),
    id=b"csi-1",
    pod=POD,
    directory=b"pods/%b/volumes/kubernetes.io~empty-dir/fuse-fd-passing" % POD.encode(),
    name=b"fuse.sock",
    old_clients=False,
    eager=False,
    read_only=False,
    allow_other=True,
    options=b"",
    group=NO_GROUP,
)
