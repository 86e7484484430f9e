"""kubelet's requests about volumes: the resulting requests to the broker, and refusals worded for a pod's author."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_broker.csi import volume_requests
from fusermount3_broker.csi.csi_pb2 import (
    INACCESSIBLE,
    NodeGetVolumeHealthRequest,
    NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest,
    NodeUnpublishVolumeRequest,
    VolumeCapability,
    VolumeUsage,
)
from fusermount3_broker.messages import csi, csi_settings
from fusermount3_broker.messages.csi import INVALID_ARGUMENT, NOT_FOUND, Publish
from fusermount3_broker.messages.sharing_key import sharing_key

POD = "0d4f6a2e-7b7a-4b54-9f5e-3f9fd3a1a111"
TARGET = f"/var/lib/kubelet/pods/{POD}/volumes/kubernetes.io~csi/data/mount"
SETTINGS = csi_settings.check("unix:///csi/csi.sock", "node", "fuse.example.org", "/var/lib/kubelet")
MODES = VolumeCapability.AccessMode
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
INFO = {
    "csi.storage.k8s.io/pod.uid": POD,
    "csi.storage.k8s.io/pod.namespace": "shop",
    "csi.storage.k8s.io/serviceAccount.name": "web",
}
KEY = "0123456789abcdef" * 4


def request(
    volume_id: str = "csi-1234",
    target_path: str = TARGET,
    mode: int = MODES.SINGLE_NODE_WRITER,
    readonly: bool = False,
    context: dict[str, str] | None = None,
    **mount: Any,
) -> NodePublishVolumeRequest:
    capability = VolumeCapability(
        mount=VolumeCapability.MountVolume(**mount),
        access_mode=MODES(mode=MODES.Mode.Name(mode) if mode in MODES.Mode.values() else None),
    )
    return NodePublishVolumeRequest(
        volume_id=volume_id,
        target_path=target_path,
        volume_capability=capability,
        readonly=readonly,
        volume_context=context or {},
    )


def publish(*args: Any, settings: csi_settings.Settings = SETTINGS, **kwargs: Any) -> Publish:
    return volume_requests.publish(request(*args, **kwargs), settings)


def refusal(request: NodePublishVolumeRequest) -> volume_requests.Refusal:
    with pytest.raises(volume_requests.Refusal) as caught:
        volume_requests.publish(request, SETTINGS)
    return caught.value


def refused(**kwargs: Any) -> str:
    """Return the text with which a request of these arguments is refused."""
    why = refusal(request(**kwargs))
    assert why.code == INVALID_ARGUMENT
    return why.text


# Publish


def test_a_volume_without_attributes_has_the_defaults() -> None:
    assert publish() == Publish(
        number=0,
        id=b"csi-1234",
        target=f"pods/{POD}/volumes/kubernetes.io~csi/data/mount".encode(),
        pod=POD.encode(),
        directory=f"pods/{POD}/volumes/kubernetes.io~empty-dir/fuse-fd-passing".encode(),
        name=b"fuse-csi-ephemeral.sock",
        old_clients=False,
        eager=False,
        read_only=False,
        allow_other=True,
        options=b"",
        group=csi.NO_GROUP,
        alone=False,
        namespace=b"",
        share=b"",
        borrows=b"",
        block=False,
        capacity=0,
    )


def test_the_attributes_say_otherwise() -> None:
    context = {
        "fdPassingEmptyDirName": "sockets",
        "fdPassingSocketName": "s3.sock",
        "mountOptions": "noexec,max_read=4096",
        "mountTiming": "eager",
        "allowOther": "false",
        "oldClients": "true",
    }
    published = publish(context=context)
    assert published.directory.endswith(b"/kubernetes.io~empty-dir/sockets")
    assert published.name == b"s3.sock"
    assert published.options == b"noexec,max_read=4096"
    assert (published.eager, published.allow_other, published.old_clients) == (True, False, True)


def test_every_attribute_is_a_field() -> None:
    assert {field for field, _ in volume_requests.ATTRIBUTES.values()} == set(volume_requests.Attributes._fields)


def test_every_attribute_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs/kubernetes.md").read_text()
    section = page.split("\n## volumeAttributes\n")[1].split("\n## ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \|(?: `([^`]*)`)?", section, re.MULTILINE))
    assert documented.keys() == volume_requests.ATTRIBUTES.keys()
    defaults = {name: documented[name] for name in ("fdPassingEmptyDirName", "fdPassingSocketName", "mountTiming")}
    assert publish(context=defaults) == publish()


def test_what_kubelet_adds_is_no_attribute() -> None:
    context = {
        "csi.storage.k8s.io/ephemeral": "true",
        "csi.storage.k8s.io/pod.name": "web",
        "csi.storage.k8s.io/pod.namespace": "shop",
        "csi.storage.k8s.io/pod.uid": POD,
        "csi.storage.k8s.io/serviceAccount.tokens": "{}",
    }
    assert publish(context=context) == publish()._replace(namespace=b"shop")


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({"mountOption": "ro"}, "volumeAttributes: unknown 'mountOption', did you mean 'mountOptions'?"),
        ({"mounttiming": "eager"}, "volumeAttributes: unknown 'mounttiming', did you mean 'mountTiming'?"),
        ({"mountTiming": "lazy"}, "volumeAttributes: 'mountTiming' must be 'onConnect' or 'eager', not 'lazy'"),
        ({"allowOther": "yes"}, "volumeAttributes: 'allowOther' must be 'true' or 'false', in quotes, not 'yes'"),
        ({"oldClients": ""}, "volumeAttributes: 'oldClients' must be 'true' or 'false', in quotes, not ''"),
        (
            {"fdPassingEmptyDirName": "../host"},
            "volumeAttributes: 'fdPassingEmptyDirName' must be the name of an emptyDir volume of the pod, "
            "not '../host'",
        ),
        (
            {"fdPassingSocketName": "a/b"},
            "volumeAttributes: 'fdPassingSocketName' must be the name of a file, of at most 97 bytes, not 'a/b'",
        ),
        ({"mountOptions": "allow_everybody"}, "mountOptions: unknown option 'allow_everybody'"),
        ({"mountOptions": "blkdev"}, "mountOptions: option blkdev is privileged"),
    ],
)
def test_a_wrong_attribute_is_named(context: dict[str, str], words: str) -> None:
    assert refused(context=context) == words


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "x" * 98, "ä" * 49, "new\nline", "nul\0"])
def test_a_socket_has_the_name_of_a_file(name: str) -> None:
    assert "'fdPassingSocketName' must be the name of a file" in refused(context={"fdPassingSocketName": name})


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "Upper", "-a", "a-", "x" * 64, "a b", "a\n"])
def test_an_empty_dir_has_a_name_that_kubernetes_allows(name: str) -> None:
    assert "must be the name of an emptyDir volume" in refused(context={"fdPassingEmptyDirName": name})


def test_what_a_refusal_repeats_is_bounded() -> None:
    assert len(refused(context={"x" * 4000: ""})) < 300
    assert len(refused(context={"mountTiming": "x" * 4000})) < 300
    assert len(refused(context={"mountOptions": "x" * 4000})) < 300
    assert len(refused(target_path="/" + "x" * 4000)) < 300


# Templates


def test_beside_the_name_of_a_template_are_its_parameters() -> None:
    context = {"volumeTemplate": "s3", "bucket": "photos", "mountOption": "x", "fdPassingEmptyDirName": "sockets"}
    assert publish(context=context) == publish(context={"fdPassingEmptyDirName": "sockets"})
    assert "'mountTiming' must be" in refused(context={**context, "mountTiming": "lazy"})


def keys(*identities: tuple[str, str] | None, **parts: Any) -> bytes:
    """Return the keys of a volume with these parts for these identities, as in `Publish.borrows`."""
    return "".join(f"{sharing_key(**parts, identity=each)}\n" for each in identities).encode()


@pytest.mark.parametrize(("ephemeral", "volume"), [("true", ""), ("false", "photos-1"), (None, "photos-1")])
def test_a_volume_of_a_template_names_the_keys_of_what_it_may_share(ephemeral: str | None, volume: str) -> None:
    own = {"volumeTemplate": "s3", "bucket": "photos"}
    context = own | INFO | {EPHEMERAL: ephemeral or ""}
    expected = keys(None, ("shop", "web"), volume=volume, attributes=own, mount_options=["ro", "noatime"], group=1000)
    asked = publish(
        volume_id="photos-1", context=context, mount_flags=["ro", "noatime"], volume_mount_group="1000", readonly=True
    )
    assert (asked.borrows, asked.namespace, asked.share) == (expected, b"shop", b"")
    assert publish(context=context).borrows not in (b"", expected)


@pytest.mark.parametrize("missing", ["csi.storage.k8s.io/pod.uid", "csi.storage.k8s.io/pod.namespace"])
def test_a_pod_that_kubelet_does_not_name_has_its_program_itself(missing: str) -> None:
    context = {"volumeTemplate": "s3", "bucket": "photos"} | INFO
    del context[missing]
    assert publish(context=context).borrows == b""


def test_a_mount_pod_offers_its_filesystem() -> None:
    asked = publish(context={"share": KEY} | INFO | {EPHEMERAL: "true"})
    assert (asked.share, asked.namespace, asked.borrows) == (KEY.encode(), b"shop", b"")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"share": "x"}, "'share' must be a key of 64 hexadecimal digits, not 'x'"),
        ({"share": ""}, "'share' must be a key of 64 hexadecimal digits, not ''"),
        ({"share": KEY.upper()}, "'share' must be a key of 64 hexadecimal digits"),
        ({"volumeTemplate": "s3"}, "'share' can't be beside 'volumeTemplate'"),
        ({"csi.storage.k8s.io/ephemeral": "false"}, "'share' is for inline volumes only"),
        ({"csi.storage.k8s.io/pod.uid": ""}, "'share' needs a CSIDriver with podInfoOnMount"),
        ({"csi.storage.k8s.io/pod.namespace": ""}, "'share' needs a CSIDriver with podInfoOnMount"),
        ({"allowOther": "false"}, "'share' is for other pods, so 'allowOther' can't be 'false'"),
        ({"oldClients": "true"}, "'share' can't be beside 'oldClients'"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_the_name_of_the_field(changed: dict[str, str], words: str) -> None:
    assert f"volumeAttributes: {words}" in refused(context={"share": KEY} | INFO | {EPHEMERAL: "true"} | changed)


def test_the_driver_of_old_clients_shares_nothing() -> None:
    of_old = SETTINGS._replace(driver_name=volume_requests.OLD_DRIVER)
    with pytest.raises(volume_requests.Refusal, match="'share' can't be beside 'oldClients'"):
        publish(context={"share": KEY} | INFO | {EPHEMERAL: "true"}, settings=of_old)


# Mount options


def test_the_options_of_the_persistent_volume_come_before_the_attributes() -> None:
    published = publish(mount_flags=["noatime", "", "max_read=4096"], context={"mountOptions": "atime"})
    assert published.options == b"noatime,max_read=4096,atime"


def test_a_mistake_in_the_options_of_the_persistent_volume_is_named() -> None:
    assert refused(mount_flags=["vers=4.1"]) == "mountOptions: unknown option 'vers=4.1'"


def test_what_is_not_printable_is_escaped_in_a_refusal() -> None:
    assert refused(mount_flags=["a\nb"]) == "mountOptions: unknown option 'a\\nb'"


def test_more_options_than_there_is_room_for_are_refused() -> None:
    assert "at most 8192 bytes" in refused(mount_flags=["noatime"] * 2000)


@pytest.mark.parametrize(
    ("mode", "readonly", "options", "expected"),
    [
        (MODES.SINGLE_NODE_WRITER, False, "", False),
        (MODES.SINGLE_NODE_WRITER, True, "", True),
        (MODES.SINGLE_NODE_WRITER, True, "rw", True),
        (MODES.SINGLE_NODE_WRITER, False, "ro", True),
        (MODES.SINGLE_NODE_WRITER, False, "ro,rw", False),
        (MODES.SINGLE_NODE_READER_ONLY, False, "", True),
        (MODES.MULTI_NODE_READER_ONLY, False, "rw", True),
        (MODES.MULTI_NODE_SINGLE_WRITER, False, "", False),
        (MODES.MULTI_NODE_MULTI_WRITER, False, "", False),
        (MODES.SINGLE_NODE_SINGLE_WRITER, False, "", False),
        (MODES.SINGLE_NODE_MULTI_WRITER, False, "", False),
    ],
)
def test_a_volume_is_read_only_if_anybody_says_so(mode: int, readonly: bool, options: str, expected: bool) -> None:
    assert publish(mode=mode, readonly=readonly, context={"mountOptions": options}).read_only is expected


# Capability


def test_one_pod_alone_has_a_volume_only_if_its_access_mode_is_that() -> None:
    alone = {mode for mode in MODES.Mode.values() if mode != MODES.UNKNOWN and publish(mode=mode).alone}
    assert alone == {MODES.SINGLE_NODE_SINGLE_WRITER}


DEVICE = f"/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv-1/{POD}"


def block_request(target: str = DEVICE, **context: str) -> NodePublishVolumeRequest:
    asked = request("disk-1", target, context={"volumeTemplate": "disks", **INFO, **context})
    asked.volume_capability.block.SetInParent()
    return asked


def test_a_block_volume_gets_the_device_of_a_mount_pod() -> None:
    published = volume_requests.publish(block_request(pool="fast"), SETTINGS)
    assert (published.block, published.pod) == (True, POD.encode())
    assert published.target == DEVICE.removeprefix("/var/lib/kubelet/").encode()
    key = sharing_key("disk-1", {"volumeTemplate": "disks", "pool": "fast"}, block=True)
    assert key.encode() in published.borrows.split()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": TARGET}, "is not where kubelet has block volumes"),
        ({"target": f"{DEVICE}/x"}, "is not where kubelet has block volumes"),
        ({"target": DEVICE.replace(POD, "0d4f6a2e")}, "the target path is pod 0d4f6a2e's, but"),
        ({"csi.storage.k8s.io/pod.namespace": ""}, "needs the attribute 'volumeTemplate' and a CSIDriver with"),
    ],
)
def test_a_block_volume_that_cannot_be_is_refused(changes: dict[str, str], said: str) -> None:
    why = refusal(block_request(**changes))
    assert why.code == INVALID_ARGUMENT
    assert said in why.text


def test_a_block_volume_without_a_template_has_no_device() -> None:
    asked = block_request()
    del asked.volume_context["volumeTemplate"]
    assert refusal(asked).text.startswith("a volume with volumeMode Block needs the attribute 'volumeTemplate'")


def test_the_capacity_is_that_of_what_is_shared() -> None:
    shared = {"share": KEY, **INFO, EPHEMERAL: "true"}
    assert publish(context={**shared, "shareCapacity": "4096"}).capacity == 4096
    assert publish(context={**shared, "shareCapacity": str(2**60)}).capacity == 2**60
    assert "'shareCapacity' must be a number of bytes, not '4Ki'" in refused(context={**shared, "shareCapacity": "4Ki"})
    assert "'shareCapacity' is for volumes with 'share'" in refused(context={"shareCapacity": "4096"})


def test_of_a_block_volume_only_the_size_is_told() -> None:
    stated = csi.Stated(0, True, 4096, 0, 0, 0, 0, b"", block=True)
    assert list(volume_requests.stats(stated).usage) == [VolumeUsage(unit=VolumeUsage.BYTES, total=4096)]


def test_a_capability_is_required() -> None:
    asked = request()
    asked.ClearField("volume_capability")
    assert refusal(asked).text == "the volume capability is missing"


def test_an_access_mode_is_required() -> None:
    assert refused(mode=MODES.UNKNOWN) == "the access mode is missing, or an unknown one"
    asked = request()
    asked.volume_capability.access_mode.MergeFromString(b"\x08\x63")  # mode 99
    assert refusal(asked).text == "the access mode is missing, or an unknown one"


def test_the_file_system_type_of_another_kind_is_refused() -> None:
    assert refused(fs_type="ext4") == "fsType must be fuse, or left out, not 'ext4'"
    assert publish(fs_type="fuse") == publish(fs_type="fuse.sshfs") == publish()


def test_the_group_is_a_number() -> None:
    assert publish(volume_mount_group="2000").group == 2000
    assert publish(volume_mount_group="0").group == 0
    for wrong in ("staff", "-1", "4294967295", "99999999999", "٣", " 1"):
        assert refused(volume_mount_group=wrong) == f"fsGroup must be the number of a group, not {wrong!r}"


# The pod and its paths


@pytest.mark.parametrize(
    "path",
    [
        "/var/lib/kubelet",
        "/var/lib/kubelet/",
        "/var/lib/kubelet/.",
        "/var/lib/kubelet2/pods/a/volumes/b",
        "/etc",
        "pods/a/volumes/b",
        "/var/lib/kubelet/pods/../../../etc",
        "/var/lib/kubelet/pods/a/..",
    ],
)
def test_a_target_outside_of_kubelets_directory_is_refused(path: str) -> None:
    assert "kubelet's directory is '/var/lib/kubelet'" in refused(target_path=path)


def test_a_target_is_required() -> None:
    assert refused(target_path="") == "the target path is missing"
    assert "none of them NUL" in refused(target_path=TARGET + "\0")
    assert "at most 4095 bytes" in refused(target_path=TARGET + "/" + "x" * 4096)


def test_a_target_is_relative_to_kubelets_directory() -> None:
    other = csi_settings.check("unix:///s", "node", "a.b", "/data/kubelet/")
    assert publish(target_path=TARGET.replace("/var/lib", "/data"), settings=other) == publish()
    root = csi_settings.check("unix:///s", "node", "a.b", "/")
    assert publish(target_path=TARGET.removeprefix("/var/lib/kubelet"), settings=root) == publish()
    assert publish(target_path=TARGET.replace("/pods", "//./pods") + "/") == publish()


def test_a_volume_id_is_required() -> None:
    assert refused(volume_id="") == "the volume id is missing"
    assert "none of them NUL" in refused(volume_id="a\0b")
    assert "at most 1024 bytes" in refused(volume_id="x" * 1025)


@pytest.mark.parametrize(
    "path", ["a", "a/volumes", "a/volumes/kubernetes-io~csi/x/mount", "a/volumes/kubernetes.io~csi/x/mount/y"]
)
def test_among_kubelets_pods_a_target_is_where_volumes_are(path: str) -> None:
    words = refused(target_path=f"/var/lib/kubelet/pods/{path}", context={"csi.storage.k8s.io/pod.uid": "a"})
    assert words == f"'pods/{path}' is not where kubelet has the volumes of a pod"


def test_where_the_target_names_no_pod_kubelet_does() -> None:
    elsewhere = "/var/lib/kubelet/plugins/elsewhere/mount"
    published = publish(target_path=elsewhere, context={"csi.storage.k8s.io/pod.uid": "abc-1"})
    assert (published.pod, published.target) == (b"abc-1", b"plugins/elsewhere/mount")
    assert published.directory == b"pods/abc-1/volumes/kubernetes.io~empty-dir/fuse-fd-passing"
    assert "can't tell whose volume it is:" in refused(target_path=elsewhere)


def test_nobody_gets_a_socket_into_another_pod() -> None:
    words = refused(context={"csi.storage.k8s.io/pod.uid": "another"})
    assert words == f"the target path is pod {POD}'s, but csi.storage.k8s.io/pod.uid is 'another'"


@pytest.mark.parametrize("uid", [".", "..", "a/b", "-a", "a b", "a\n", "x" * 129, "\0"])
def test_the_uid_of_a_pod_leads_nowhere_else(uid: str) -> None:
    words = refused(target_path="/var/lib/kubelet/elsewhere/mount", context={"csi.storage.k8s.io/pod.uid": uid})
    assert words == f"{uid[:128]!r} is not the UID of a pod"


def test_the_driver_whose_place_is_taken_has_old_clients() -> None:
    old = SETTINGS._replace(driver_name="meta-fuse-csi-plugin.csi.storage.pfn.io")
    assert publish(settings=old).old_clients
    assert not publish(settings=old, context={"oldClients": "false"}).old_clients


TEXT = st.text(max_size=30)
LIKELY = st.sampled_from(["", "ro", "rw", "noexec", "true", "false", "eager", "onConnect", "..", "a\0b", "x" * 5000])


@given(
    st.one_of(TEXT, LIKELY, st.just("csi-1")),
    st.one_of(TEXT, st.builds("/var/lib/kubelet/{}".format, TEXT), st.builds(f"{TARGET}/{{}}".format, TEXT)),
    st.integers(0, 8),
    st.dictionaries(
        st.one_of(TEXT, st.sampled_from([*volume_requests.ATTRIBUTES, "csi.storage.k8s.io/pod.uid"])),
        st.one_of(TEXT, LIKELY),
    ),
    st.lists(st.one_of(TEXT, LIKELY), max_size=3),
    TEXT,
)
def test_whatever_kubelet_says_is_refused_or_can_be_asked(
    volume_id: str, target: str, mode: int, context: dict[str, str], flags: list[str], group: str
) -> None:
    asked = request(volume_id, target, mode, context=context, mount_flags=flags, volume_mount_group=group)
    try:
        published = volume_requests.publish(asked, SETTINGS)
    except volume_requests.Refusal as why:
        assert why.code == INVALID_ARGUMENT
        assert len(why.text) < 1000
        return
    assert csi.load(csi.dump(published)) == published
    for path in (published.target, published.directory):
        assert path and not {b"", b".", b".."} & set(path.split(b"/"))
    assert b"/" not in published.name
    assert published.pod in published.directory.split(b"/")


# Unpublish, stats and health


def test_unpublish_and_stat_name_volume_and_target() -> None:
    target = f"pods/{POD}/volumes/kubernetes.io~csi/data/mount".encode()
    unpublish = NodeUnpublishVolumeRequest(volume_id="v", target_path=TARGET)
    assert volume_requests.unpublish(unpublish, SETTINGS) == csi.Unpublish(0, b"v", target)
    stat = NodeGetVolumeStatsRequest(volume_id="v", volume_path=TARGET)
    assert volume_requests.stat(stat, SETTINGS) == csi.Stat(0, b"v", target)
    health = NodeGetVolumeHealthRequest(volume_id="v", volume_publish_path=TARGET)
    assert volume_requests.health(health, SETTINGS) == csi.Stat(0, b"v", target)
    anywhere = NodeGetVolumeHealthRequest(volume_id="v")
    assert volume_requests.health(anywhere, SETTINGS) == csi.Stat(0, b"v", b"")


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (NodeUnpublishVolumeRequest(target_path=TARGET), INVALID_ARGUMENT),
        (NodeUnpublishVolumeRequest(volume_id="v"), INVALID_ARGUMENT),
        (NodeUnpublishVolumeRequest(volume_id="v", target_path="/etc"), INVALID_ARGUMENT),
        (NodeGetVolumeStatsRequest(volume_path=TARGET), INVALID_ARGUMENT),
        (NodeGetVolumeStatsRequest(volume_path="some/path"), INVALID_ARGUMENT),
        (NodeGetVolumeStatsRequest(volume_id="v"), INVALID_ARGUMENT),
        (NodeGetVolumeStatsRequest(volume_id="v", volume_path="some/path"), NOT_FOUND),
        (NodeGetVolumeHealthRequest(volume_publish_path=TARGET), INVALID_ARGUMENT),
        (NodeGetVolumeHealthRequest(volume_id="v", volume_publish_path="some/path"), NOT_FOUND),
    ],
)
def test_what_is_missing_or_elsewhere_is_refused(
    request_: NodeUnpublishVolumeRequest | NodeGetVolumeStatsRequest | NodeGetVolumeHealthRequest, code: int
) -> None:
    with pytest.raises(volume_requests.Refusal) as caught:
        if isinstance(request_, NodeUnpublishVolumeRequest):
            volume_requests.unpublish(request_, SETTINGS)
        elif isinstance(request_, NodeGetVolumeHealthRequest):
            volume_requests.health(request_, SETTINGS)
        else:
            volume_requests.stat(request_, SETTINGS)
    assert caught.value.code == code


def test_a_served_volume_says_how_full_it_is() -> None:
    answer = volume_requests.stats(csi.Stated(0, True, 1000, 300, 200, 10, 4, b""))
    assert not answer.volume_condition.abnormal
    assert list(answer.usage) == [
        VolumeUsage(unit=VolumeUsage.BYTES, total=1000, available=200, used=700),
        VolumeUsage(unit=VolumeUsage.INODES, total=10, available=4, used=6),
    ]


def test_a_volume_in_trouble_says_so() -> None:
    answer = volume_requests.stats(csi.Stated(0, False, 0, 0, 0, 0, 0, b"no FUSE program serves it"))
    assert (answer.volume_condition.abnormal, answer.volume_condition.message) == (True, "no FUSE program serves it")
    assert [usage.total for usage in answer.usage] == [0, 0]


def test_the_health_of_a_volume_says_nothing_unless_it_is_in_trouble() -> None:
    well = volume_requests.health_of("v", csi.Stated(0, True, 9, 9, 9, 9, 9, b""))
    assert (well.volume_health.volume_id, list(well.volume_health.health_statuses)) == ("v", [])
    (entry,) = volume_requests.health_of(
        "v", csi.Stated(0, False, 0, 0, 0, 0, 0, b"hangs")
    ).volume_health.health_statuses
    assert (entry.status, entry.reason, entry.message) == (INACCESSIBLE, "NotServed", "hangs")


def test_a_filesystem_with_more_free_than_there_is_uses_nothing() -> None:
    answer = volume_requests.stats(csi.Stated(0, True, 5, 9, 9, 5, 9, b""))
    assert [usage.used for usage in answer.usage] == [0, 0]
