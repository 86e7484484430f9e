"""An SSH server in a pod, with the files that sshfs reads and writes, and the Secret that its clients need."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster import commands
from tests.cluster.images import SSH_SERVER
from tests.e2e.documented import block
from tests.lab.commands import run

if TYPE_CHECKING:
    from tests.cluster.node import ClusterNode

NAMESPACE = POD = "server"
EXPORT = "/export"
_PORT, _USER, _KEYS = 2222, 1000, "/etc/server"

_SERVER = f"""\
HostKey {_KEYS}/host_key
AuthorizedKeysFile {_KEYS}/user_key.pub
Port {_PORT}
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
Subsystem sftp internal-sftp -d {EXPORT}
MaxStartups 1000
MaxSessions 1000
"""
#: As docs/kubernetes.md has it, with another port.
_CLIENT = """\
Host server
    HostName {address}
    Port {port}
    User user
    IdentityFile /etc/sshfs/id_ed25519
    UserKnownHostsFile /etc/sshfs/known_hosts
"""
_BEGIN = f"""
cd {EXPORT}
echo hello > hello
mkdir -p reports
echo first > reports/first
exec /usr/sbin/sshd -D -e -f {_KEYS}/config
"""


def deploy(node: ClusterNode) -> None:
    """Start the server, and make the Secret in the namespace `default`, as docs/kubernetes.md says."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for key in ("host_key", "user_key"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", directory / key])
        (directory / "config").write_text(_SERVER)
        node.kubectl("create", "namespace", NAMESPACE)
        files = [f"--from-file={directory}/{name}" for name in ("config", "host_key", "user_key.pub")]
        node.kubectl("create", "secret", "generic", POD, *files, "--namespace", NAMESPACE)
        node.kubectl("apply", "--filename=-", input=yaml.safe_dump(_pod()))
        node.kubectl("wait", "--for=condition=Ready", f"pod/{POD}", "--namespace", NAMESPACE, "--timeout=120s")
        address = node.kubectl(
            "get", f"pod/{POD}", "--namespace", NAMESPACE, "--output", "jsonpath={.status.podIP}"
        ).stdout
        client = directory / "client"
        client.mkdir()
        (client / "config").write_text(_CLIENT.format(address=address, port=_PORT))
        (client / "id_ed25519").write_bytes((directory / "user_key").read_bytes())
        (client / "known_hosts").write_text(f"[{address}]:{_PORT} {(directory / 'host_key.pub').read_text()}")
        commands.execute(node, block("kubernetes.md", "kubectl create secret").text, client)


def execute(node: ClusterNode, script: str) -> str:
    """Run a shell script in the exported directory, as the server's user; return its output."""
    command = ["exec", POD, "--namespace", NAMESPACE, "--", "sh", "-euc", f"cd {EXPORT}; {script}"]
    return node.kubectl(*command).stdout


def _pod() -> dict[str, Any]:
    container = {
        "name": POD,
        "image": SSH_SERVER,
        "command": ["sh", "-euc", _BEGIN],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 1},
        # It stands for another machine, so it must not wait for its clients, which request nothing.
        "resources": {"requests": {"cpu": "20m"}},
        "volumeMounts": [{"name": "keys", "mountPath": _KEYS}, {"name": "export", "mountPath": EXPORT}],
    }
    volumes = [{"name": "keys", "secret": {"secretName": POD}}, {"name": "export", "emptyDir": {}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": POD, "namespace": NAMESPACE},
        "spec": {
            "hostNetwork": True,  # its clients know its address, which must stay the same if the node reboots
            "containers": [container],
            "volumes": volumes,
            "securityContext": {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER},
            "terminationGracePeriodSeconds": 1,
        },
    }
