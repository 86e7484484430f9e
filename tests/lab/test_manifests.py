"""Manifests are read as Kubernetes reads them, and no field in them is silently ignored."""

from __future__ import annotations

import pytest

from tests.lab import manifests
from tests.lab.manifests import CsiVolume, EmptyDir, Files, NotUnderstood, Probe, VolumeMount

INLINE = """
apiVersion: v1
kind: Secret
metadata: {name: account}
data: {PASSWORD: c2VjcmV0}
stringData: {USER: somebody}
---
apiVersion: v1
kind: Pod
metadata: {name: pod, namespace: team}
spec:
  hostUsers: false
  securityContext: {runAsUser: 1000, fsGroup: 2000}
  initContainers:
  - name: starter
    image: starter
    restartPolicy: Always
    envFrom: [{secretRef: {name: account}}]
    env: [{name: WORD, valueFrom: {secretKeyRef: {name: account, key: PASSWORD}}}, {name: OTHER, value: value}]
    startupProbe: {exec: {command: [is-mounted]}, periodSeconds: 1, failureThreshold: 300}
    securityContext: {runAsUser: 0, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
  containers:
  - name: consumer
    image: consumer
    command: [sleep]
    args: [infinity]
    volumeMounts:
    - {name: data, mountPath: /data, readOnly: true, mountPropagation: HostToContainer}
    - {name: data, mountPath: /part, subPath: some/part}
  volumes:
  - {name: sockets, emptyDir: {medium: Memory}}
  - {name: keys, secret: {secretName: account, defaultMode: 0400}}
  - {name: data, csi: {driver: some.driver, readOnly: true, volumeAttributes: {mountTiming: eager}}}
"""

CLAIM = """
kind: PersistentVolume
metadata: {name: volume}
spec:
  accessModes: [ReadWriteMany]
  mountOptions: [noatime]
  csi: {driver: some.driver, volumeHandle: handle, volumeAttributes: {key: value}}
---
kind: PersistentVolumeClaim
metadata: {name: claim}
spec: {volumeName: volume}
---
kind: Pod
metadata: {name: pod}
spec:
  containers: [{name: only, image: image}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: claim, readOnly: true}}]
"""


def test_a_pod_with_an_inline_volume() -> None:
    pod = manifests.parse(INLINE)
    assert (pod.name, pod.namespace, pod.host_users, pod.fs_group) == ("pod", "team", False, 2000)
    assert pod.volumes == (
        EmptyDir("sockets", in_memory=True),
        Files("keys", {"PASSWORD": b"secret", "USER": b"somebody"}, 0o400),
        CsiVolume("data", "data", "some.driver", read_only=True, attributes={"mountTiming": "eager"}),
    )
    assert pod.csi_volumes()[0].ephemeral


def test_its_containers() -> None:
    pod = manifests.parse(INLINE)
    (starter,), (consumer,) = pod.init_containers, pod.containers
    assert starter.sidecar and not consumer.sidecar
    assert starter.env == {"USER": "somebody", "PASSWORD": "secret", "WORD": "secret", "OTHER": "value"}
    assert starter.startup == Probe(("is-mounted",), 1, 300)
    assert (starter.user, starter.read_only_root, starter.drop_capabilities) == (0, True, ("ALL",))
    assert (consumer.user, consumer.command, consumer.args) == (1000, ("sleep",), ("infinity",))
    assert consumer.mounts == (
        VolumeMount("data", "/data", read_only=True, sub_path="", propagation="HostToContainer"),
        VolumeMount("data", "/part", read_only=False, sub_path="some/part", propagation="None"),
    )


def test_a_secret_that_somebody_has_made_before() -> None:
    pod = manifests.parse(INLINE.partition("---")[2], {"account": {"PASSWORD": b"other"}})
    assert Files("keys", {"PASSWORD": b"other"}, 0o400) in pod.volumes


def test_a_claim_is_bound_to_the_volume_that_it_names() -> None:
    pod = manifests.parse(CLAIM)
    (volume,) = pod.csi_volumes()
    assert volume == CsiVolume(
        *("data", "volume", "some.driver", "handle"),
        read_only=True,
        attributes={"key": "value"},
        mount_options=("noatime",),
        access_mode="ReadWriteMany",
    )
    assert not volume.ephemeral


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hostUsers: false", "hostNetwork: true"),
        ("restartPolicy: Always", "lifecycle: {}"),
        ("subPath: some/part", "subPathExpr: $(part)"),
        ("medium: Memory", "unknown: field"),
        ("capabilities: {drop: [ALL]}", "privileged: true"),
        ("name: account, key: PASSWORD", "name: missing, key: PASSWORD"),
    ],
)
def test_what_the_lab_does_not_act_upon_is_an_error(old: str, new: str) -> None:
    assert old in INLINE
    with pytest.raises(NotUnderstood):
        manifests.parse(INLINE.replace(old, new))
