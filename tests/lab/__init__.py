"""The lab: real containers, real FUSE programs and a real sshd, for the end-to-end tests and for `make demo`.

Read in this order:

- `cache`     what is slow to make is made once, kept outside the checkout, and checked before it is used
  again;
- `images`    container images out of Debian packages, since no registry is needed to get those;
- `podman`    containers as a user starts them: default capabilities, no /dev/fuse, no network;
- `programs`  FUSE programs of our own, compiled from tests/programs;
- `sshd`      the other end of sshfs;
- `node`, `kubelet`, `cluster`   what kubelet does with a pod, on a node of its own; `manifests` are how it knows the
  pod, `csi` is how it speaks to the driver;
- `debian`, `pypi`   what is shipped, built as it is for a release, and machines on which it is installed.

But for `broker`, `cluster` and these two, nothing here knows the proxy or the broker: a test puts them into a container
as a user would, as a volume.
The lab needs root and the Debian packages in the file `apt-packages` beside this one.
"""
