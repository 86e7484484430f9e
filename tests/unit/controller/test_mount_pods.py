"""Mount pods: whom they serve, their names and manifests, and what is said of those that exist."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.messages.sharing_key import sharing_key
from fusermount3_controller import mount_pods, rendering, shared_volumes
from fusermount3_controller.faults import Invalid
from fusermount3_controller.mount_pods import Phase, User, existing
from fusermount3_controller.served_volumes import Known, missing
from fusermount3_controller.volume_templates import parse
from fusermount3_controller.wanted_mount_pods import wanted
from fusermount3_proxy import client, wire
from tests.unit.controller.cluster import (
    at,
    ending,
    failed,
    known,
    mount_of,
    mount_pod,
    serving,
    user,
    user_inline,
)
from tests.unit.controller.samples import Manifest, claim, pod_of, shared, volume

ATTRIBUTES = {"volumeTemplate": "s3", "bucket": "photos"}

# Whom they serve


def test_a_mount_pod_can_use_the_volume_of_another_one() -> None:
    """Middleware: the program of one template works on files of another."""
    manifest = shared("crypt")
    pod_of(manifest)["volumes"] = [{"name": "base", "persistentVolumeClaim": {"claimName": "base"}}]
    layers = Known(
        {"s3": known().templates["s3"], "crypt": parse(manifest)},
        {("team", "photos"): claim(volumeName="photos"), ("fuse-mounts", "base"): claim("base", volumeName="base")},
        {"photos": volume(template="crypt"), "base": volume("base")},
    )
    upper = mount_of([user()], layers)
    pod = mount_pod(upper)
    pod["spec"]["nodeName"] = "n1"
    mounts = wanted([user(), pod], layers).mounts.values()
    assert {mount.shared.template.name: [each.name for each in mount.users] for mount in mounts} == {
        "crypt": ["app"],
        "s3": [f"{upper.name}-0"],
    }


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"provisioningModes": ["Dynamic"]}, "is only for volumes that it creates"),
        ({"volumeValidation": {"volumeModes": ["Block"]}}, "spec.volumeMode: must be Block, not Filesystem"),
        ({"volumeValidation": {"accessModes": ["ReadOnlyMany"]}}, "must be of ReadOnlyMany, not ReadWriteMany"),
        ({"volumeValidation": {"minCapacity": "2Gi"}}, "at least 2147483648 bytes, not 1073741824"),
        ({"volumeValidation": {"maxCapacity": "1e6"}}, "at most 1000000 bytes, not 1073741824"),
    ],
)
def test_a_volume_that_exists_is_checked(spec: Manifest, says: str) -> None:
    photos = volume()
    photos["spec"] |= {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"]}
    cluster = known(**spec)._replace(volumes={"photos": photos})
    with pytest.raises(Invalid, match=says):
        shared_volumes.of_new_pod(user(), cluster)
    photos["metadata"]["annotations"] = {"pv.kubernetes.io/provisioned-by": "csi.fusermount3-proxy.dev"}
    assert shared_volumes.of_new_pod(user(), cluster)


def test_pods_with_the_same_volume_on_a_node_share_a_pod() -> None:
    mounts = wanted([user("a"), user("b"), user("c", node="n2")], known()).mounts
    assert {place[0]: [each.name for each in mount.users] for place, mount in mounts.items()} == {
        "n1": ["a", "b"],
        "n2": ["c"],
    }
    assert len({mount.name for mount in mounts.values()}) == 2


def test_a_user_is_there_since_it_was_scheduled_or_if_nobody_says_when_since_it_was_created() -> None:
    later, other, new = user("a", since=5), user("b", since=5), user("c", since=5)
    later["status"]["conditions"][0]["lastTransitionTime"] = at(8)
    del other["status"]["conditions"], new["status"], new["metadata"]["creationTimestamp"]
    users = mount_of([later, other, new], known()).users
    assert [(each.since, each.is_new) for each in users] == [(at(8), False), (at(5), False), ("", True)]


def test_the_key_is_that_of_the_node_plugin() -> None:
    (mount,) = wanted([user(securityContext={"fsGroup": 1000})], known()).mounts.values()
    assert mount.shared.key == sharing_key("photos", ATTRIBUTES, (), 1000)
    (mount,) = wanted([user_inline(bucket="photos")], known()).mounts.values()
    assert mount.shared.key == sharing_key("", ATTRIBUTES)


def test_a_program_is_told_what_the_volume_is() -> None:
    manifest = shared()
    names = ("handle", "capacity", "accessModes[0]", "volumeMode", "node.metadata.name", "pvc.metadata.namespace")
    pod_of(manifest)["containers"][0]["args"] = ["{{ " + name + " }}" for name in (*names, "pv.metadata.name")]
    cluster = known()._replace(templates={"s3": parse(manifest)})
    photos = volume()
    photos["spec"] |= {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "volumeMode": "Filesystem",
        "claimRef": {"namespace": "team", "name": "photos", "uid": "1"},
    }
    mount = mount_of([user()], cluster._replace(volumes={"photos": photos}))
    (container,) = mount_pods.manifest(mount, 0, "uid")["spec"]["containers"]
    assert container["args"] == ["photos", str(2**30), "ReadWriteMany", "Filesystem", "n1", "team", "photos"]


@pytest.mark.parametrize(
    "change",
    [
        {"handle": "other"},
        {"bucket": "films"},
        {"mountOptions": ["ro"]},
        {"fsGroup": 2000},
        {"inline": True},
    ],
)
def test_what_is_different_is_not_shared(change: dict[str, Any]) -> None:
    manifest = volume(bucket=change.get("bucket", "photos"))
    manifest["spec"]["csi"]["volumeHandle"] = change.get("handle", "photos")
    manifest["spec"]["mountOptions"] = change.get("mountOptions", [])
    other = user(securityContext={"fsGroup": change.get("fsGroup", 1000)})
    other = user_inline(bucket="photos") if "inline" in change else other
    (mine,) = wanted([user(securityContext={"fsGroup": 1000})], known()).mounts
    (theirs,) = wanted([other], known()._replace(volumes={"photos": manifest})).mounts
    assert mine[1] != theirs[1]


def test_who_only_reads_shares_with_who_writes() -> None:
    reader = user("reader")
    reader["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = True
    mount = mount_of([user(), reader], known())
    (own,) = [each for each in mount_pods.shown(mount.shared)["spec"]["volumes"] if "csi" in each]
    assert "readOnly" not in own["csi"]


def test_with_the_identity_of_users_each_account_has_its_own() -> None:
    cluster = known(identity="ServiceAccount")
    mounts = wanted([user("a"), user("b", serviceAccountName="default"), user("c", serviceAccountName="x")], cluster)
    assert sorted(mount.shared.identity or () for mount in mounts.mounts.values()) == [
        ("team", "default"),
        ("team", "x"),
    ]
    for mount in mounts.mounts.values():
        made = mount_pods.manifest(mount, 0, "owner")
        assert made["metadata"]["namespace"] == "team"
        assert made["spec"]["serviceAccountName"] == (mount.shared.identity or ("", ""))[1]
        assert made["spec"]["automountServiceAccountToken"] is True


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"phase": "Succeeded"}, False),
        ({"phase": "Failed"}, False),
        ({"phase": "Pending"}, True),
        ({"phase": "Unknown"}, True),
        ({"node": ""}, False),
    ],
)
def test_who_is_on_a_node_and_not_finished_counts(change: dict[str, Any], counts: bool) -> None:
    assert bool(wanted([user(**change)], known()).mounts) == counts


def test_who_is_about_to_end_still_counts() -> None:
    (mount,) = wanted([ending(user())], known()).mounts.values()
    assert mount.users == (User("team", "app", "uid of app", at(0), is_ending=True),)
    assert not mount.users[0].is_leaving
    (mount,) = wanted([ending(user(phase="Pending"))], known()).mounts.values()
    assert mount.users[0].is_new and mount.users[0].is_leaving


def test_who_has_the_driver_s_socket_serves_itself() -> None:
    by_hand = user()
    by_hand["spec"]["volumes"].append({"name": "fuse-fd-passing", "emptyDir": {}})
    assert wanted([by_hand], known()) == wanted([], known())


def test_what_is_not_clear_is_left_as_it_is() -> None:
    held = frozenset({("n1", "s3")})
    sidecar = shared()
    sidecar["spec"] = {**sidecar["spec"], "placement": "Sidecar"}
    del sidecar["spec"]["allowInline"]
    storage_class = {
        "provisioner": "csi.fusermount3-proxy.dev",
        "parameters": {"volumeTemplate": "s3", "bucket": "photos"},
    }
    unbound = known()._replace(claims={("team", "photos"): claim(storageClassName="c")}, classes={"c": storage_class})
    for cluster in (
        known()._replace(templates={}),
        known(parameters={"bucket": {"pattern": "films"}}),
        known()._replace(templates={"s3": parse(sidecar)}),
        known(allowedNamespaces={"matchLabels": {"a": "b"}}),
        unbound,
    ):
        assert wanted([user()], cluster).held == held
        assert not wanted([user()], cluster).mounts
    assert not wanted([user()], known()).held
    assert wanted([user_inline(bucket="photos")], known(allowInline=False)).held == held
    assert wanted([user(hostUsers=False)], known()).held == held


def test_pods_of_others_need_nothing() -> None:
    other = user()
    other["spec"]["volumes"] = [{"name": "a", "persistentVolumeClaim": {"claimName": "other"}}]
    assert wanted([other, mount_pod(mount_of([user()], known()))], known()) == wanted([], known())


def test_an_ephemeral_volume_is_that_of_its_claim() -> None:
    template = {"spec": {"storageClassName": "c"}}
    ephemeral = user()
    ephemeral["spec"]["volumes"] = [{"name": "data", "ephemeral": {"volumeClaimTemplate": template}}]
    cluster = known()._replace(claims={("team", "app-data"): claim(volumeName="photos")})
    assert missing(ephemeral, cluster) == set()
    (mount,) = wanted([ephemeral], cluster).mounts.values()
    assert mount.shared.key == sharing_key("photos", ATTRIBUTES)


@given(st.permutations(["a", "b", "c"]))
def test_the_order_of_pods_makes_no_difference(names: list[str]) -> None:
    volumes = {name: volume(name) for name in names}
    for each in volumes.values():
        each["spec"]["csi"]["volumeHandle"] = "same"
    claims = {("team", name): claim(name, volumeName=name) for name in names}
    pods = [user(name) for name in names]
    for each in pods:
        each["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] = each["metadata"]["name"]
    cluster = Known(known().templates, claims, volumes)
    (mount,) = wanted(pods, cluster).mounts.values()
    assert (mount.shared.source.persistent_volume, [each.name for each in mount.users]) == ("a", ["a", "b", "c"])


# What is created


def test_a_mount_pod_is_valid_and_restricted() -> None:
    mount = mount_of([user(securityContext={"fsGroup": 2000})], known())
    made = mount_pods.manifest(mount, 3, "uid")
    kubernetes_validate.validate(made, "1.30", strict=True)
    assert made["metadata"]["name"] == f"{mount.name}-3"
    assert made["metadata"]["namespace"] == "fuse-mounts"
    assert made["metadata"]["annotations"] == {"cluster-autoscaler.kubernetes.io/daemonset-pod": "true"}
    spec = made["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 2000,
    }
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert (spec["automountServiceAccountToken"], spec["terminationGracePeriodSeconds"]) == (False, 600)
    assert {frozenset(each.keys() - {"name"}) for each in spec["volumes"]} == {
        frozenset({"emptyDir"}),
        frozenset({"csi"}),
    }


def test_the_scheduler_puts_it_on_the_node_of_its_users() -> None:
    spec = mount_pods.manifest(mount_of([user(node="n7")], known()), 0, "uid")["spec"]
    assert "nodeName" not in spec
    ((term,),) = [each["nodeSelectorTerms"] for each in spec["affinity"]["nodeAffinity"].values()]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]}
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == rendering.PRIORITY_CLASS


def test_its_owner_is_its_attachment_so_that_drain_takes_it() -> None:
    mount = mount_of([user()], known())
    (owner,) = mount_pods.manifest(mount, 0, "the uid")["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "fusermount3-proxy.dev/v1alpha1",
        "kind": "MountPodAttachment",
        "name": mount.name,
        "uid": "the uid",
        "controller": True,
    }
    assert mount_pods.attachment(mount)["metadata"]["name"] == mount.name


def test_its_volume_offers_what_users_look_for() -> None:
    manifest = volume(mountOptions="c", allowOther="false", oldClients="true", fdPassingSocketName="x.sock")
    manifest["spec"]["mountOptions"] = ["a", "b=1"]
    mount = mount_of([user()], known()._replace(volumes={"photos": manifest}))
    made = mount_pods.manifest(mount, 0, "uid")
    (own,) = [each["csi"] for each in made["spec"]["volumes"] if "csi" in each]
    assert own == {
        "driver": "csi.fusermount3-proxy.dev",
        "volumeAttributes": {
            "fdPassingEmptyDirName": "fd-passing",
            "mountOptions": "a,b=1,c",
            "share": mount.shared.key,
        },
    }


def test_it_ends_when_nobody_uses_it_unless_the_template_says_how() -> None:
    (container,) = mount_pods.shown(mount_of([user()], known()).shared)["spec"]["containers"]
    assert container["lifecycle"] == {"preStop": {"exec": {"command": ["fusermount3-proxy", "--wait-unused"]}}}
    manifest = shared()
    pod_of(manifest)["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["sync"]}}}
    cluster = known()._replace(templates={"s3": parse(manifest)})
    (container,) = mount_pods.shown(mount_of([user()], cluster).shared)["spec"]["containers"]
    assert container["lifecycle"] == {"preStop": {"exec": {"command": ["sync"]}}}


def test_the_name_is_that_of_key_node_and_generation() -> None:
    def name(**change: Any) -> str:
        return mount_of([user(node=change.pop("node", "n1"))], known(**change)).name

    assert name() == name(idleSeconds=5)
    assert len({name(), name(node="n2"), name(generation=2)}) == 3


def test_an_attachment_says_what_the_pod_serves() -> None:
    cluster = known(3, identity="ServiceAccount")
    mount = mount_of([user(securityContext={"fsGroup": 1000})], cluster)
    assert mount_pods.attachment(mount)["spec"] == {
        "key": mount.shared.key,
        "nodeName": "n1",
        "volumeTemplate": "s3",
        "templateGeneration": 3,
        "mountPodNamespace": "",
        "persistentVolumeName": "photos",
        "volumeID": "photos",
        "mountOptions": "",
        "workloadFSGroup": "1000",
        "workloadNamespace": "team",
        "workloadServiceAccountName": "default",
    }


# What exists


def test_a_mount_pod_is_found_again() -> None:
    mount = mount_of([user()], known())
    one = existing(serving(mount, 12, since=3))
    assert one and (one.base, one.number, one.phase, one.served_since) == (mount.name, 12, Phase.SERVED, at(3))
    assert (existing(mount_pod(mount)) or one).phase is Phase.PENDING
    assert (existing(failed(mount)) or one).phase is Phase.FAILED
    assert (existing(ending(serving(mount))) or one).phase is Phase.ENDING


@pytest.mark.parametrize(
    "change",
    [
        {"name": "mp-0123456789abcdef0123-0"},
        {"name": "app"},
        {"ownerReferences": []},
        {"ownerReferences": None},
    ],
)
def test_what_only_looks_like_one_is_none(change: Manifest) -> None:
    made = mount_pod(mount_of([user()], known()))
    made["metadata"] |= change
    assert existing(made) is None


def container(state: Manifest, last: Manifest | None = None) -> Manifest:
    return {"containerStatuses": [{"name": "fuse", "state": state, "lastState": last or {}}]}


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({}, ""),
        (container({"waiting": {"reason": "ContainerCreating"}}), ""),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes are available: 1 Insufficient cpu.",
                    }
                ]
            },
            "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu.",
        ),
        (
            container({"waiting": {"reason": "ErrImagePull", "message": "no such image"}}),
            "ErrImagePull: no such image",
        ),
        (
            container(
                {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}},
                {"terminated": {"reason": "Error", "exitCode": 1, "message": "starting\nno such bucket\n"}},
            ),
            "Error, status 1: no such bucket",
        ),
        (container({"terminated": {"reason": "OOMKilled", "exitCode": 137}}), "OOMKilled, status 137"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        (container({"waiting": {"reason": "X", "message": "y" * 5000}}), "X: " + "y" * 497),
    ],
)
def test_why_it_does_not_serve_is_said_in_the_words_of_scheduler_or_kubelet(status: Manifest, says: str) -> None:
    one = existing(mount_pod(mount_of([user()], known()), **status))
    assert one and one.failure == says


def test_what_the_broker_says_is_told_and_not_the_number_of_the_request(capfd: pytest.CaptureFixture[str]) -> None:
    """The number is another one each time, and so would be the event."""
    client.print_reply(b"fusermount3-proxy", wire.Reply(b"ade9f933", errno=22, text=b"the device has 512 bytes"))
    ended = {"reason": "Error", "exitCode": 1, "message": capfd.readouterr().err}
    one = existing(mount_pod(mount_of([user()], known()), **container({"terminated": ended})))
    assert one and one.failure == "Error, status 1: fusermount3-proxy: the device has 512 bytes"


def test_who_serves_has_not_failed() -> None:
    mount = mount_of([user()], known())
    restarted = serving(mount)
    restarted["status"] |= container({"running": {}}, {"terminated": {"exitCode": 1}})
    assert (existing(restarted) or existing(failed(mount))).failure == ""  # type: ignore[union-attr]


def test_the_node_plugin_says_the_same_of_who_serves_itself() -> None:
    """A pod of ours has the emptyDir, and so never borrows what it offers."""
    made = mount_pod(mount_of([user()], known()))
    assert shared_volumes.of_pod(made, known()) == ([], set())
