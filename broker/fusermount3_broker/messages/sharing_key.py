"""Which FUSE filesystem pods of one node share: the key that controller and node plugin compute alike.

The controller writes it into the attribute `share` of the volume by which a mount pod offers a filesystem. For each pod
that uses a volume of a template, the node plugin computes it from what kubelet says, and looks for a filesystem that is
offered under it. The node is no part of it: the node plugin knows only the filesystems of its own.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

#: In characters; all of them are hexadecimal digits.
LENGTH = 64


def sharing_key(
    volume: str,
    attributes: Mapping[str, str],
    mount_options: Iterable[str] = (),
    group: int | None = None,
    identity: tuple[str, str] | None = None,
    *,
    block: bool = False,
) -> str:
    """Return the key, SHA-256 in lower-case hexadecimal digits.

    `volume`: the volumeHandle of a PersistentVolume; empty for an inline volume, whose id kubelet makes for each pod.
    `attributes`: the volumeAttributes, among them `volumeTemplate`; those with a slash in the name are left out, as
    they are kubelet's and the provisioner's. `mount_options`: of the PersistentVolume, in its order, which may matter
    to the FUSE program. `group`: the fsGroup of the pod; None without one. `identity`: namespace and name of the pod's
    ServiceAccount, if the template says that the program runs with it; else None. `block`: whether the pod gets a
    device (volumeMode Block): of two PersistentVolumes with one volumeHandle, one may be a filesystem.
    """
    own = {name: value for name, value in attributes.items() if "/" not in name}
    parts = [volume, own, list(mount_options), group, identity, *(["Block"] if block else [])]
    text = json.dumps(parts, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
