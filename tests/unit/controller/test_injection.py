"""Sidecars in pods: where they are put, what they have, and what of a pod stays as it was."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusermount3_broker.csi import volume_requests
from fusermount3_controller import pod_annotations, rendering, template_parameters
from fusermount3_controller.faults import Invalid
from fusermount3_controller.injection import inject
from fusermount3_controller.quantities import quantity
from fusermount3_controller.served_volumes import Known, uses
from fusermount3_controller.volume_templates import parse
from tests.unit.controller.samples import Manifest, claimed, inline, pod, pod_of, template

DRIVER = rendering.DRIVER
TEMPLATES = {"s3": parse(template()), "shared": parse(template("Shared", "shared"))}
KNOWN = Known(TEMPLATES)


def sidecars(pod: Manifest) -> list[str]:
    return [each["name"] for each in pod["spec"].get("initContainers", [])]


def annotated(pod: Manifest, **annotations: str) -> Manifest:
    pod["metadata"]["annotations"] = {
        f"fusermount3-proxy.dev/{name.replace('_', '-')}": value for name, value in annotations.items()
    }
    return pod


def bound(**attributes: str) -> Known:
    """Return a claim, bound to a volume that names the template."""
    given = {"volumeTemplate": "s3", "bucket": "photos", **attributes}
    csi = {"driver": DRIVER, "volumeHandle": "x", "volumeAttributes": given}
    return KNOWN._replace(
        claims={("team", "photos"): {"spec": {"volumeName": "pv", "storageClassName": "other"}}},
        volumes={"pv": {"spec": {"csi": csi}}},
    )


def refused(pod: Manifest, known: Known = KNOWN) -> str:
    with pytest.raises(Invalid) as caught:
        inject(pod, known)
    return str(caught.value)


def test_a_pod_gets_one_container_and_two_volumes_and_nothing_else_is_changed() -> None:
    before = pod(inline(), terminationGracePeriodSeconds=300)
    result = inject(before, KNOWN)
    (container,) = result["spec"].pop("initContainers")
    assert (container["name"], container["restartPolicy"]) == ("fuse-data", "Always")
    assert container["args"] == ["s3fs", "photos", "/mnt"]
    assert [each["name"] for each in result["spec"]["volumes"]] == [
        "data",
        "fuse-fd-passing-data",
        "fuse-data-mountpoint",
    ]
    attributes = result["spec"]["volumes"][0]["csi"].pop("volumeAttributes")
    assert attributes == {"fdPassingEmptyDirName": "fuse-fd-passing-data"}
    del before["spec"]["volumes"][0]["csi"]["volumeAttributes"], result["spec"]["volumes"][1:]
    assert result["spec"]["containers"][0]["volumeMounts"][0].pop("mountPropagation") == "HostToContainer"
    assert result == before


def test_the_pod_that_was_given_stays_as_it_is() -> None:
    before = annotated(pod(inline()), inject="true", cpu_limit="1")
    copied = copy.deepcopy(before)
    inject(before, KNOWN)
    assert before == copied


def test_a_volume_is_found_where_the_driver_makes_its_socket() -> None:
    attributes = volume_requests.Attributes()
    assert volume_requests.TEMPLATE == template_parameters.TEMPLATE_ATTRIBUTE
    assert (attributes.empty_dir, attributes.socket) == (rendering.DEFAULT_DIRECTORY, rendering.DEFAULT_SOCKET)
    result = inject(pod(inline(fdPassingEmptyDirName="sockets", fdPassingSocketName="s")), KNOWN)
    (container,) = result["spec"]["initContainers"]
    assert container["env"][-1]["value"] == "/run/fusermount3-proxy/s"
    assert container["volumeMounts"][0] == {"name": "sockets", "mountPath": "/run/fusermount3-proxy"}
    assert {"name": "sockets", "emptyDir": {}} in result["spec"]["volumes"]


def test_a_persistent_volume_is_found_by_its_claim_and_stays_as_it_is() -> None:
    result = inject(pod(claimed()), bound())
    assert sidecars(result) == ["fuse-data"]
    assert [each["name"] for each in result["spec"]["volumes"]] == ["data", "fuse-fd-passing", "fuse-data-mountpoint"]
    assert result["spec"]["volumes"][0] == claimed()


def test_a_claim_that_is_not_bound_is_found_by_its_class() -> None:
    known = KNOWN._replace(
        claims={("team", "photos"): {"spec": {"storageClassName": "s3"}}},
        classes={
            "s3": {
                "provisioner": DRIVER,
                "parameters": {"volumeTemplate": "s3", "bucket": "photos", "csi.storage.k8s.io/fstype": "fuse"},
            }
        },
    )
    assert sidecars(inject(pod(claimed()), known)) == ["fuse-data"]
    ephemeral = {"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": "s3"}}}}
    assert sidecars(inject(pod(ephemeral), known)) == ["fuse-data"]


@pytest.mark.parametrize(
    ("volume", "known"),
    [
        ({"name": "data", "csi": {"driver": "other", "volumeAttributes": {"volumeTemplate": "s3"}}}, KNOWN),
        ({"name": "data", "csi": {"driver": DRIVER}}, KNOWN),
        ({"name": "data", "emptyDir": {}}, KNOWN),
        (claimed(), KNOWN),
        (claimed(), KNOWN._replace(claims={("other", "photos"): {"spec": {"volumeName": "pv"}}})),
        (claimed(), KNOWN._replace(claims={("team", "photos"): {"spec": {"volumeName": "pv"}}})),
        (claimed(), KNOWN._replace(claims={("team", "photos"): {"spec": {}}})),
    ],
)
def test_all_other_volumes_are_left_alone(volume: Manifest, known: Known) -> None:
    assert inject(pod(volume), known) == pod(volume)
    assert "none of the pod's volumes" in refused(annotated(pod(volume), inject="true"), known)


def test_a_shared_volume_needs_no_sidecar() -> None:
    before = annotated(pod(inline(template="shared")), inject="true")
    assert inject(before, KNOWN) == before


def test_the_pod_can_do_without() -> None:
    before = annotated(pod(inline()), inject="false")
    assert inject(before, KNOWN) == before
    assert "must be 'true' or 'false', not 'yes'" in refused(annotated(pod(inline()), inject="yes"))


@pytest.mark.parametrize(
    ("containers", "order"),
    [
        ([], ["fuse-data"]),
        (["setup"], ["fuse-data", "setup"]),
        (["setup", "istio-proxy!", "x"], ["setup", "istio-proxy", "fuse-data", "x"]),
        (["istio-proxy", "x"], ["fuse-data", "istio-proxy", "x"]),
    ],
)
def test_the_sidecar_is_first_or_after_a_native_istio_proxy(containers: list[str], order: list[str]) -> None:
    given = [
        {"name": name.rstrip("!"), "image": "i", **({"restartPolicy": "Always"} if name.endswith("!") else {})}
        for name in containers
    ]
    assert sidecars(inject(pod(inline(), initContainers=given), KNOWN)) == order


def test_each_volume_has_its_own_sidecar_and_socket() -> None:
    result = inject(pod(inline("a"), inline("b")), KNOWN)
    assert sidecars(result) == ["fuse-a", "fuse-b"]
    names = [each["name"] for each in result["spec"]["volumes"]]
    assert len(set(names)) == len(names) == 6
    two = pod(claimed("a"), claimed("b"))
    assert "'a' and 'b' would have the same socket" in refused(two, bound())


def test_a_volume_that_no_container_uses_gets_no_sidecar_for_kubelet_does_not_publish_it() -> None:
    before = pod(inline("used"), inline("unused"))
    app = before["spec"]["containers"][0]
    del app["volumeMounts"][1]
    assert sidecars(inject(before, KNOWN)) == ["fuse-used"]
    early = {"name": "early", "image": "i", "volumeMounts": [{"name": "unused", "mountPath": "/x"}]}
    before["spec"]["initContainers"] = [early]
    assert sidecars(inject(before, KNOWN)) == ["fuse-used", "fuse-unused", "early"]
    before["spec"]["initContainers"] = []
    app["volumeDevices"] = [{"name": "unused", "devicePath": "/dev/x"}]
    assert sidecars(inject(before, KNOWN)) == ["fuse-used", "fuse-unused"]


def test_sidecars_share_no_volume_by_chance() -> None:
    said = refused(pod(inline("fd-passing-a"), inline("a-mountpoint")))
    assert "two sidecars would have a volume 'fuse-fd-passing-a-mountpoint'" in said


def test_who_serves_the_volume_by_hand_is_left_alone() -> None:
    own = {"name": "s3fs", "image": "i", "volumeMounts": [{"name": "fuse-fd-passing", "mountPath": "/run/x"}]}
    before = pod(claimed(), {"name": "fuse-fd-passing", "emptyDir": {}}, initContainers=[own])
    assert inject(before, bound()) == before


def test_a_volume_of_the_author_takes_the_place_of_ours() -> None:
    own = {"name": "fuse-data-mountpoint", "emptyDir": {"medium": "Memory"}}
    volumes = inject(pod(inline(), own), KNOWN)["spec"]["volumes"]
    assert [each for each in volumes if each["name"] == own["name"]] == [own]


def test_what_its_author_says_of_propagation_counts() -> None:
    before = pod(inline())
    before["spec"]["containers"][0]["volumeMounts"][0]["mountPropagation"] = "None"
    result = inject(before, KNOWN)
    assert result["spec"]["containers"][0]["volumeMounts"][0]["mountPropagation"] == "None"


def test_a_container_that_comes_later_gets_propagation_too() -> None:
    for volume, known in ((inline(), KNOWN), (claimed(), bound())):
        result = inject(pod(volume), known)
        late = {"name": "late", "image": "i", "volumeMounts": [{"name": "data", "mountPath": "/x"}]}
        result["spec"]["containers"].append(late)
        again = inject(result, known)
        assert again["spec"]["containers"][1]["volumeMounts"][0]["mountPropagation"] == "HostToContainer"


@pytest.mark.parametrize(
    ("own", "result", "note"), [(0, 60, "0"), (None, 60, "30"), (59, 60, "59"), (60, 60, None), (300, 300, None)]
)
def test_a_pod_has_the_time_that_the_program_needs(own: int | None, result: int, note: str | None) -> None:
    injected = inject(pod(inline(), **({} if own is None else {"terminationGracePeriodSeconds": own})), KNOWN)
    assert injected["spec"]["terminationGracePeriodSeconds"] == result
    assert injected["metadata"].get("annotations", {}).get(pod_annotations.ORIGINAL_GRACE) == note


def test_a_template_says_how_much_time() -> None:
    manifest = template()
    pod_of(manifest)["terminationGracePeriodSeconds"] = 120
    injected = inject(pod(inline()), Known({"s3": parse(manifest)}))
    assert injected["spec"]["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        (
            {"volumeTemplate": "s4"},
            ".volumeTemplate: there is no VolumeTemplate 's4'; there are s3, shared",
        ),
        ({"bukcet": "x"}, "the template 's3': unknown 'bukcet', did you mean 'bucket'?"),
        ({"bucket": "x"}, ".bucket: 'x' does not match"),
    ],
)
def test_a_wrong_attribute_is_told_with_its_field(attributes: dict[str, str], says: str) -> None:
    volume = inline()
    volume["csi"]["volumeAttributes"] |= attributes
    assert refused(pod(volume)).startswith("spec.volumes[0].csi.volumeAttributes")
    assert says in refused(pod(volume))
    assert refused(pod(claimed()), bound(**attributes)).startswith("PersistentVolume pv: spec.csi.volumeAttributes")


def test_what_a_template_can_not_evaluate_is_told_with_the_template() -> None:
    manifest = template(args=["{{ params.bucket | int }}"])
    said = refused(pod(inline()), Known({"s3": parse(manifest)}))
    assert said == "the template 's3': spec.containers[0].args[0]: 'photos' is not a whole number"


def test_a_template_sees_the_pod_and_the_volume() -> None:
    args = ["{{ 'ro' if readOnly else 'rw' }}", "{{ 'gid=' ~ fsGroup if fsGroup }}"]
    known = Known({"s3": parse(template(args=args))})
    volume = inline()
    volume["csi"]["readOnly"] = True
    container = inject(pod(volume, securityContext={"fsGroup": 1000}), known)["spec"]["initContainers"][0]
    assert container["args"] == ["ro", "gid=1000"]
    assert inject(pod(inline()), known)["spec"]["initContainers"][0]["args"] == ["rw"]


# Resources


def resources(template_has: Manifest | None, **annotations: str) -> Manifest:
    manifest = template()
    pod_of(manifest)["containers"][0] |= {"resources": template_has} if template_has else {}
    result: Manifest = inject(annotated(pod(inline()), **annotations), Known({"s3": parse(manifest)}))
    found: Manifest = result["spec"]["initContainers"][0]["resources"]
    return found


@pytest.mark.parametrize(
    ("annotations", "limits", "requests"),
    [
        ({}, {}, {"cpu": "250m", "memory": "256Mi"}),
        ({"cpu_limit": "1"}, {"cpu": "1"}, {"cpu": "1", "memory": "256Mi"}),
        ({"cpu_request": "1"}, {"cpu": "1"}, {"cpu": "1", "memory": "256Mi"}),
        ({"cpu_limit": "1", "cpu_request": "500m"}, {"cpu": "1"}, {"cpu": "500m", "memory": "256Mi"}),
        ({"memory_limit": "0"}, {}, {"cpu": "250m", "memory": "256Mi"}),
        ({"memory_limit": "0", "memory_request": "1Gi"}, {}, {"cpu": "250m", "memory": "1Gi"}),
        ({"cpu_request": "0"}, {}, {"memory": "256Mi"}),
        (
            {"ephemeral_storage_limit": "5Gi"},
            {"ephemeral-storage": "5Gi"},
            {"cpu": "250m", "memory": "256Mi", "ephemeral-storage": "5Gi"},
        ),
        ({"ephemeral_storage_limit": "0"}, {}, {"cpu": "250m", "memory": "256Mi"}),
    ],
)
def test_resources_are_those_of_the_annotations(annotations: dict[str, str], limits: Any, requests: Any) -> None:
    found = resources(None, **annotations)
    assert (found.get("limits", {}), found.get("requests", {})) == (limits, requests)


def test_annotations_count_more_than_the_template_and_that_more_than_the_defaults() -> None:
    own = {"requests": {"cpu": "2"}, "limits": {"memory": "2Gi"}}
    assert resources(own) == own
    assert resources(own, memory_limit="1Gi") == {
        "requests": {"cpu": "2", "memory": "1Gi"},
        "limits": {"memory": "1Gi"},
    }


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"cpu_limit": "much"}, "cpu-limit: must be a quantity such as 250m or 1Gi, not 'much'"),
        ({"memory_request": "-1"}, "memory-request: must be a quantity"),
        ({"cpu_limit": "1", "cpu_request": "2"}, "cpu-request: is more than the limit, 1"),
        ({"memory_limit": "1Gi", "memory_request": "2000Mi"}, "memory-request: is more than the limit, 1Gi"),
        ({"additional_volume_mounts": "ca"}, "must be VOLUME:/PATH, separated by commas, not 'ca'"),
        ({"additional_volume_mounts": "ca:x"}, "must be VOLUME:/PATH"),
        ({"additional_volume_mounts": "ca:/x"}, "the pod has no volume 'ca'"),
        ({"additional_volume_mounts": "data:/mnt/"}, "the sidecar has another volume at '/mnt'"),
    ],
)
def test_a_wrong_annotation_is_told_by_its_name(annotations: dict[str, str], says: str) -> None:
    said = refused(annotated(pod(inline()), **annotations))
    assert said.startswith("fusermount3-proxy.dev/") and says in said


def test_a_sidecar_gets_additional_volumes_read_only() -> None:
    ca = {"name": "ca", "configMap": {"name": "ca"}}
    result = inject(annotated(pod(inline(), ca), additional_volume_mounts="ca:/etc/ca/, ca:/x"), KNOWN)
    assert result["spec"]["initContainers"][0]["volumeMounts"][2:] == [
        {"name": "ca", "mountPath": "/etc/ca", "readOnly": True},
        {"name": "ca", "mountPath": "/x", "readOnly": True},
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("250m", "0.25"),
        ("1.5", "1.5"),
        ("1k", "1000"),
        ("1Ki", "1024"),
        ("2Gi", str(2 << 30)),
        ("1Ei", str(2**60)),
        (str(2**60), str(2**60)),
        # The greatest that Kubernetes knows.
        ("8Ei", str(2**63 - 1)),
        (str(10**29), str(2**63 - 1)),
        ("1e20", str(2**63 - 1)),
    ],
)
def test_quantities(text: str, number: str) -> None:
    assert str(quantity(text).normalize()) == str(Decimal(number).normalize())


def test_a_token_of_the_template_is_for_the_sidecar_only() -> None:
    """With it, a program proves who it is, for instance to a cloud. What the pod itself has and is stays."""
    token = {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token", "audience": "s3"}}]}}
    mount = {"name": "token", "mountPath": "/var/run/token", "readOnly": True}
    manifest = template(volumeMounts=[mount])
    pod_of(manifest)["volumes"] = [token]
    own = {"name": "own", "secret": {"secretName": "own"}}
    before = pod(inline(), own, serviceAccountName="reader", automountServiceAccountToken=False)
    result = inject(before, Known({"s3": parse(manifest)}))["spec"]
    assert (result["serviceAccountName"], result["automountServiceAccountToken"]) == ("reader", False)
    assert result["volumes"][1] == own
    assert {"name": "fuse-data-token", "projected": token["projected"]} in result["volumes"]
    (sidecar,), (app,) = result["initContainers"], result["containers"]
    assert {**mount, "name": "fuse-data-token"} in sidecar["volumeMounts"]
    assert [each["name"] for each in app["volumeMounts"]] == ["data", "own"]


# Any pod


_NAMES = st.from_regex("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)
#: Fields that the API may get later.
_FUTURE = st.dictionaries(st.from_regex("future[A-Z]{1,3}", fullmatch=True), _VALUES, max_size=3)


@st.composite
def _pods(draw: st.DrawFn) -> Manifest:
    names = draw(st.lists(_NAMES, min_size=1, max_size=4, unique=True))
    makers = [inline, lambda name: inline(name, "shared"), lambda name: {"name": name, "emptyDir": {}}]
    volumes = [draw(st.sampled_from(makers))(name) for name in names]
    result = pod(*volumes, **draw(_FUTURE))
    result["spec"]["containers"][0] |= draw(_FUTURE)
    if draw(st.booleans()):
        istio = {"name": "istio-proxy", "image": "i", "restartPolicy": "Always"}
        result["spec"]["initContainers"] = [istio, {"name": "setup", "image": "i"} | draw(_FUTURE)]
    if draw(st.booleans()):
        result["spec"]["terminationGracePeriodSeconds"] = draw(st.integers(0, 1000))
    if draw(st.booleans()):
        annotated(result, cpu_limit=draw(st.sampled_from(["0", "1", "500m"])))
    return result


@settings(max_examples=1000)
@given(_pods())
def test_injected_twice_is_injected_once_and_nothing_of_the_pod_is_lost(before: Manifest) -> None:
    result = inject(before, KNOWN)
    assert inject(result, KNOWN) == result
    wanted = [use for use in uses(before, KNOWN) if use.template.name == "s3"]
    assert len(sidecars(result)) == len(sidecars(before)) + len(wanted)
    containers = result["spec"].get("initContainers", [])
    assert all(len(each["name"]) <= 63 for each in (*result["spec"]["volumes"], *containers))
    ours = {use.container for use in wanted}
    for name in ("containers", "initContainers"):
        own = [each for each in result["spec"].get(name, []) if each["name"] not in ours]
        for container, original in zip(own, before["spec"].get(name, []), strict=True):
            for mount in container.get("volumeMounts", []):
                mount.pop("mountPropagation", None)
            assert container == original
    changed = {"containers", "initContainers", "volumes", "terminationGracePeriodSeconds"}
    assert {name: value for name, value in result["spec"].items() if name not in changed} == {
        name: value for name, value in before["spec"].items() if name not in changed
    }
