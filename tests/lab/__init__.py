"""The lab: real containers, real FUSE programs and a real sshd, for the end-to-end tests and for `make demo`.

Read in this order:

- `cache`     results that are slow to make: made once, kept outside the checkout, and checked before each use;
- `images`    container images out of Debian packages, which need no registry;
- `podman`    containers as a user starts them: default capabilities, no /dev/fuse, no network;
- `denied`    a command to which the kernel denies system calls;
- `programs`  FUSE programs of the project's own, compiled from tests/programs;
- `sshd`      the other end of sshfs;
- `node`, `kubelet`, `cluster`   kubelet's handling of a pod, on a node of its own; `manifests` reads the pod, `csi`
  calls the driver;
- `debian`, `pypi`   the shipped packages, built as for a release, and machines on which they are installed.

Except for `broker`, `cluster` and these two, no module here knows the proxy or the broker: a test puts them into a
container as a user would, as a volume. The lab needs root and the Debian packages in the file `apt-packages` beside
this one.
"""
