"""What the programs of a node are told: certificates, kubeconfigs, their configuration files and command lines.

`write` fills the directory that the node has as /etc/kubernetes. Each cluster has a certificate authority of its own,
and all addresses are those of the nodes' own network namespaces, so clusters don't get in each other's way.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.commands import Argument, run

if TYPE_CHECKING:
    from collections.abc import Sequence

DIRECTORY = Path("/etc/kubernetes")
ADMIN = "admin.kubeconfig"
"""With certificates in it: it can be used from outside the node's root filesystem, too."""

NAME = "node"
ADDRESS = "192.168.77.1"
_SERVICES, _SERVICE = "10.96.0.0/16", "10.96.0.1"
_ETCD = "http://127.0.0.1:2379"
_CONTAINERD = "/run/containerd/containerd.sock"
PAUSE = "localhost/pause:1"
"""The image of a pod's first container, which keeps its namespaces."""


@dataclass(frozen=True)
class Machine:
    """What sets the nodes of a cluster apart: the name, the address, and those of its pods."""

    name: str
    address: str
    pods: str
    has_control_plane: bool
    is_node: bool = True

    @property
    def services(self) -> Sequence[Sequence[str]]:
        """Return the command lines of its programs. All start at once: each waits for those that it needs, or ends and
        is started again.
        """
        if not self.is_node:
            return (ETCD, APISERVER, (*CONTROLLER_MANAGER, _NO_NODE_LIFECYCLE), SCHEDULER)
        kubelet = (*KUBELET, *_options(hostname_override=self.name, node_ip=self.address))
        return (*(CONTROL_PLANE if self.has_control_plane else ()), CONTAINERD, kubelet)


FIRST = Machine(NAME, ADDRESS, "10.88.0.0/16", True)
SECOND = Machine("second-node", "192.168.77.2", "10.89.0.0/16", False)
SIMULATED = Machine(NAME, ADDRESS, "10.88.0.0/16", True, is_node=False)
"""A control plane alone, for nodes that are simulated: nobody finds out that they do not answer."""
_NO_NODE_LIFECYCLE = "--controllers=*,-node-lifecycle-controller"

#: The subjects of the clients' certificates but kubelet's; the groups are in the API server's own rules.
_CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "kube-apiserver": "/O=system:masters/CN=kube-apiserver",
    "kube-controller-manager": "/CN=system:kube-controller-manager",
    "kube-scheduler": "/CN=system:kube-scheduler",
}
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_USES = "extendedKeyUsage=serverAuth,clientAuth\n"
_DAYS = "365"
_AUTHORITY = ("ca.crt", "ca.key", "service-accounts.crt", "service-accounts.key")


def write(directory: Path, cgroup_root: str, machine: Machine = FIRST, first: Path | None = None) -> None:
    """Write all files; kubelet puts the cgroups of pods below `cgroup_root`.

    `first` is the directory that was filled for the first machine of the cluster, if this is not the first.
    """
    if first is None:
        _make_authority(directory)
    else:
        for name in _AUTHORITY:
            shutil.copy(first / name, directory)
    for client, subject in (_CLIENTS | {"kubelet": f"/O=system:nodes/CN=system:node:{machine.name}"}).items():
        _sign(directory, client, subject, machine)
        (directory / f"{client}.kubeconfig").write_text(json.dumps(_kubeconfig(directory, client)))
    (directory / "cni").mkdir()
    (directory / "cni/bridge.conflist").write_text(json.dumps(_network(machine.pods)))
    (directory / "containerd.toml").write_text(_CONTAINERD_TOML)
    (directory / "kubelet.yaml").write_text(json.dumps(_kubelet(cgroup_root)))


def _make_authority(directory: Path) -> None:
    for name in ("ca", "service-accounts"):
        files: list[Argument] = ["-keyout", directory / f"{name}.key", "-out", directory / f"{name}.crt"]
        run(["openssl", "req", "-x509", *_KEY, "-days", _DAYS, "-subj", f"/CN={name}", *files])


def _sign(directory: Path, name: str, subject: str, machine: Machine) -> None:
    """Make a key, and a certificate for a client, or a server at the machine's address."""
    names = f"subjectAltName=IP:{machine.address},IP:{_SERVICE},DNS:{machine.name},DNS:kubernetes\n"
    key, certificate = directory / f"{name}.key", directory / f"{name}.crt"
    request = run(["openssl", "req", *_KEY, "-subj", subject, "-keyout", key]).stdout
    authority: list[Argument] = [
        "-CA",
        directory / "ca.crt",
        "-CAkey",
        directory / "ca.key",
        "-CAcreateserial",
        "-days",
        _DAYS,
    ]
    with tempfile.NamedTemporaryFile("w") as extensions:
        extensions.write(names + _USES)
        extensions.flush()
        run(
            ["openssl", "x509", "-req", *authority, "-extfile", extensions.name, "-out", certificate],
            input=request,
        )


def _kubeconfig(directory: Path, client: str) -> dict[str, Any]:
    def content(name: str) -> str:
        return base64.b64encode((directory / name).read_bytes()).decode()

    cluster = {"server": f"https://{ADDRESS}:6443", "certificate-authority-data": content("ca.crt")}
    user = {"client-certificate-data": content(f"{client}.crt"), "client-key-data": content(f"{client}.key")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": cluster}],
        "users": [{"name": client, "user": user}],
        "contexts": [{"name": "context", "context": {"cluster": "cluster", "user": client}}],
        "current-context": "context",
    }


def _kubelet(cgroup_root: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{DIRECTORY}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{DIRECTORY}/kubelet.crt",
        "tlsPrivateKeyFile": f"{DIRECTORY}/kubelet.key",
        "containerRuntimeEndpoint": f"unix://{_CONTAINERD}",
        "clusterDNS": ["10.96.0.10"],  # nobody answers, but without it each pod gets a warning
        "cgroupRoot": cgroup_root,
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,  # a lower one takes CAP_SYS_RESOURCE
        # Nobody else's full disk may end the pods or delete the images.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "volumeStatsAggPeriod": "5s",  # or it takes minutes until a pod that uses too much is evicted
    }


def _network(pods: str) -> dict[str, Any]:
    addresses = {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


# The erofs and blockfile snapshotters and NRI are of no use here, and each prints why it does not work.
_CONTAINERD_TOML = f"""\
version = 3
disabled_plugins = [
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.nri.v1.nri",
]

[grpc]
address = "{_CONTAINERD}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true  # without CAP_SYS_RESOURCE

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{DIRECTORY}/cni"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.crun.options]
BinaryName = "/usr/bin/crun"
"""


def _options(**options: str) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


ETCD: Sequence[str] = (
    "etcd",
    *_options(data_dir="/var/lib/etcd", listen_client_urls=_ETCD, advertise_client_urls=_ETCD),
    "--unsafe-no-fsync",
)
CONTAINERD: Sequence[str] = ("containerd", f"--config={DIRECTORY}/containerd.toml")
APISERVER: Sequence[str] = (
    "kube-apiserver",
    *_options(
        etcd_servers=_ETCD,
        advertise_address=ADDRESS,
        endpoint_reconciler_type="none",
        service_cluster_ip_range=_SERVICES,
        authorization_mode="Node,RBAC",
        # It asks webhooks at the addresses of their pods: no kube-proxy makes those of Services work.
        enable_aggregator_routing="true",
        enable_admission_plugins="NodeRestriction",
        allow_privileged="true",
        client_ca_file=f"{DIRECTORY}/ca.crt",
        tls_cert_file=f"{DIRECTORY}/kube-apiserver.crt",
        tls_private_key_file=f"{DIRECTORY}/kube-apiserver.key",
        kubelet_certificate_authority=f"{DIRECTORY}/ca.crt",
        kubelet_client_certificate=f"{DIRECTORY}/kube-apiserver.crt",
        kubelet_client_key=f"{DIRECTORY}/kube-apiserver.key",
        kubelet_preferred_address_types="InternalIP",
        service_account_issuer="https://kubernetes.default",
        service_account_key_file=f"{DIRECTORY}/service-accounts.crt",
        service_account_signing_key_file=f"{DIRECTORY}/service-accounts.key",
    ),
)
CONTROLLER_MANAGER: Sequence[str] = (
    "kube-controller-manager",
    *_options(
        kubeconfig=f"{DIRECTORY}/kube-controller-manager.kubeconfig",
        service_account_private_key_file=f"{DIRECTORY}/service-accounts.key",
        root_ca_file=f"{DIRECTORY}/ca.crt",
        use_service_account_credentials="true",
        leader_elect="false",
    ),
)
SCHEDULER: Sequence[str] = (
    "kube-scheduler",
    *_options(kubeconfig=f"{DIRECTORY}/kube-scheduler.kubeconfig", leader_elect="false"),
)
KUBELET: Sequence[str] = (
    "kubelet",
    *_options(
        config=f"{DIRECTORY}/kubelet.yaml",
        kubeconfig=f"{DIRECTORY}/kubelet.kubeconfig",
    ),
)
CONTROL_PLANE = (ETCD, APISERVER, CONTROLLER_MANAGER, SCHEDULER)
