"""The answers to the API server: a patch that makes the pod what it should be, or one sentence."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusermount3_controller import rendering, shared_volumes
from fusermount3_controller.admission import (
    ACCEPTED,
    INJECTED,
    REFUSED,
    UNCHANGED,
    Answer,
    about_pod,
    about_template,
    checked,
    injected,
)
from fusermount3_controller.faults import Invalid
from fusermount3_controller.injection import inject
from fusermount3_controller.served_volumes import Kind, Known, Reference, missing
from fusermount3_controller.volume_templates import parse
from tests.unit.controller.samples import Manifest, claimed, inline, pod, review, shared, template

KNOWN = Known({"s3": parse(template()), "shared": parse(template("Shared", "shared"))})
CLAIM = {"spec": {"storageClassName": "photos"}}
CLASS = {"provisioner": rendering.DRIVER, "parameters": {"volumeTemplate": "s3", "bucket": "photos"}}


def answered(pod: Manifest, known: Known = KNOWN) -> Answer:
    return injected(about_pod(review(pod)), known)


def patched(pod: Manifest, answer: Answer) -> Manifest:
    """Return what the API server makes of the pod."""
    response = answer.review["response"]
    assert response["allowed"]
    operations = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    assert response.get("patchType", "JSONPatch") == "JSONPatch"
    result: Manifest = jsonpatch.apply_patch(pod, operations)
    return result


def test_the_answer_has_the_request_s_uid_and_a_patch() -> None:
    given = pod(inline())
    said = answered(given)
    assert (said.result, said.review["apiVersion"], said.review["kind"]) == (
        INJECTED,
        "admission.k8s.io/v1",
        "AdmissionReview",
    )
    assert said.review["response"]["uid"] == "1"
    assert patched(given, said) == inject(given, KNOWN)


def test_a_pod_without_such_volumes_gets_no_patch() -> None:
    said = answered(pod({"name": "data", "emptyDir": {}}, claimed("other")))
    assert said.result == UNCHANGED
    assert said.review["response"] == {"uid": "1", "allowed": True}


def test_what_was_answered_is_answered_with_no_patch() -> None:
    first = pod(inline(), inline("more", bucket="films"))
    said = answered(patched(first, answered(first)))
    assert said.result == UNCHANGED


extra = st.dictionaries(st.text("xyz", min_size=1), st.none() | st.integers() | st.text() | st.lists(st.text()))


@given(extra, extra, st.booleans(), st.lists(st.sampled_from(["a", "b", "istio-proxy"]), unique=True))
def test_fields_that_nobody_knows_survive(
    of_pod: Manifest, of_container: Manifest, has: bool, names: list[str]
) -> None:
    given = pod(inline(), initContainers=[{"name": name, "restartPolicy": "Always"} for name in names])
    given["spec"] |= {f"later{name}": value for name, value in of_pod.items()}
    given["spec"]["containers"][0] |= {f"later{name}": value for name, value in of_container.items()}
    if not has:
        del given["spec"]["initContainers"]
    result = patched(given, answered(given))
    assert result == inject(given, KNOWN)
    assert result["spec"].items() >= {f"later{name}": value for name, value in of_pod.items()}.items()
    assert patched(result, answered(result)) == result


def test_the_namespace_is_that_of_the_request_and_not_patched() -> None:
    known = KNOWN._replace(claims={("team", "photos"): CLAIM}, classes={"photos": CLASS})
    given = pod(claimed())
    del given["metadata"]["namespace"]
    said = answered(given, known)
    assert said.result == INJECTED
    assert "namespace" not in patched(given, said)["metadata"]


@pytest.mark.parametrize(
    ("volume", "says"),
    [
        (inline(bucket="X"), "spec.volumes[0].csi.volumeAttributes.bucket: 'X' does not match [a-z0-9.-]{3,63}"),
        (inline(template="s4"), "there is no VolumeTemplate 's4'; there are s3, shared"),
        (inline(template="old"), "the VolumeTemplate 'old' can't be used: spec.x: is wrong"),
        (inline(template="shared"), "the template 'shared' has not allowInline: name it in a PersistentVolume"),
    ],
)
def test_a_refusal_is_a_sentence(volume: Manifest, says: str) -> None:
    said = answered(pod(volume), KNOWN._replace(unusable={"old": "spec.x: is wrong"}))
    response = said.review["response"]
    assert (said.result, response["allowed"], response["uid"]) == (REFUSED, False, "1")
    assert response["status"]["message"].endswith(says)
    assert said.why == response["status"]["message"]


SHARED = KNOWN._replace(templates={"s3": parse(shared())})


def test_a_shared_volume_is_not_injected() -> None:
    said = answered(pod(inline()), SHARED)
    assert said.result == UNCHANGED
    asks = pod(inline())
    asks["metadata"]["annotations"] = {"fusermount3-proxy.dev/inject": "true"}
    assert answered(asks, SHARED).result == UNCHANGED


@pytest.mark.parametrize("wish", [None, "false"])
def test_a_shared_volume_that_could_not_be_used_is_refused_whatever_the_pod_asks_for(wish: str | None) -> None:
    given = pod(inline(), hostUsers=False)
    if wish:
        given["metadata"]["annotations"] = {"fusermount3-proxy.dev/inject": wish}
    said = answered(given, SHARED)
    assert said.result == REFUSED
    assert said.why == f"spec.hostUsers: {shared_volumes.USER_NAMESPACE}"


def test_a_shared_volume_of_another_namespace_is_refused() -> None:
    template = parse(shared(allowedNamespaces={"matchLabels": {"team": "a"}}))
    known = KNOWN._replace(templates={"s3": template})
    assert missing(pod(inline()), known) == {Reference(Kind.NAMESPACE, "team")}
    for labels, result in (({}, REFUSED), ({"team": "b"}, REFUSED), ({"team": "a"}, UNCHANGED)):
        told = known._replace(namespaces={"team": {"metadata": {"labels": labels}}})
        assert missing(pod(inline()), told) == set()
        said = answered(pod(inline()), told)
        assert said.result == result
        assert (said.why or "is not for the namespace 'team' (allowedNamespaces)").endswith("(allowedNamespaces)")


def test_all_that_is_wrong_with_shared_volumes_is_told_at_once() -> None:
    known = KNOWN._replace(templates={"s3": parse(shared(allowInline=False))})
    said = answered(pod(inline(bucket="X"), inline("more"), hostUsers=False), known)
    for part in ("'X' does not match", "has not allowInline", "spec.hostUsers"):
        assert said.why.count(part) == 1


def test_a_container_of_the_pod_s_author_may_serve_a_volume_that_others_share() -> None:
    by_hand = pod(inline(), {"name": "fuse-fd-passing", "emptyDir": {}}, hostUsers=False)
    assert answered(by_hand, SHARED).result == UNCHANGED


def test_a_sidecar_from_which_another_webhook_took_what_makes_it_one_is_told() -> None:
    given = pod(inline())
    given = patched(given, answered(given))
    del given["spec"]["initContainers"][0]["restartPolicy"]
    said = answered(given)
    assert said.result == REFUSED
    assert said.why.startswith("spec.initContainers[0].restartPolicy: a sidecar that serves a volume must have")
    given["spec"]["initContainers"][0]["env"] = [{"name": "OTHER"}]
    assert answered(given).result == UNCHANGED


def test_what_is_not_a_pod_s_creation_is_no_request() -> None:
    right = review(pod())
    about_pod(right)
    wrong: list[Any] = [None, [], {}, right | {"apiVersion": "admission.k8s.io/v1beta1"}]
    for name, value in [("uid", None), ("operation", "UPDATE"), ("object", None), ("object", {"kind": "Job"})]:
        wrong.append(copy.deepcopy(right))
        wrong[-1]["request"][name] = value
    for each in wrong:
        with pytest.raises(Invalid):
            about_pod(each)


# Templates


def asked_about(template: Manifest, operation: str = "CREATE") -> Answer:
    asked = review(template)
    asked["request"]["operation"] = operation
    return checked(about_template(asked))


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
def test_a_template_that_can_be_used_is_accepted(operation: str) -> None:
    said = asked_about(template(), operation)
    assert (said.result, said.review["response"]) == (ACCEPTED, {"uid": "1", "allowed": True})


def test_a_template_is_refused_with_all_that_is_wrong_by_field() -> None:
    said = asked_about(template(args=["{{ params.bukcet }}"], securityContext={"privileged": True}))
    assert (said.result, said.review["response"]["allowed"]) == (REFUSED, False)
    field = "spec.volumeStaging.podTemplate.spec.containers[0]"
    assert f"{field}.args[0]: params.bukcet is not in spec.parameters" in said.why
    assert f"{field}.securityContext.privileged: must be false" in said.why


def test_a_pod_is_no_template() -> None:
    with pytest.raises(Invalid):
        about_template(review(pod()))
    with pytest.raises(Invalid):
        about_pod(review(template()))


# What has to be looked up


def test_objects_are_missing_one_after_the_other() -> None:
    given, known = pod(claimed()), Known()
    assert missing(given, known) == {Reference(Kind.CLAIM, "photos", "team")}
    known = known._replace(claims={("team", "photos"): CLAIM})
    assert missing(given, known) == {Reference(Kind.CLASS, "photos")}
    known = known._replace(classes={"photos": CLASS})
    assert missing(given, known) == {Reference(Kind.TEMPLATE, "s3")}
    assert missing(given, known._replace(templates=KNOWN.templates)) == set()


def test_a_bound_claim_names_its_volume_and_no_class() -> None:
    claim = {"spec": {"volumeName": "pv", "storageClassName": "photos"}}
    known = Known(claims={("team", "photos"): claim})
    assert missing(pod(claimed()), known) == {Reference(Kind.VOLUME, "pv")}
    known = known._replace(volumes={"pv": {"spec": {"csi": {"driver": "other"}}}})
    assert missing(pod(claimed()), known) == set()


def test_an_ephemeral_claim_is_in_the_pod_until_it_exists() -> None:
    volume = {"name": "data", "ephemeral": {"volumeClaimTemplate": CLAIM}}
    assert missing(pod(volume), Known()) == {Reference(Kind.CLASS, "photos")}
    on_a_node, claim = pod(volume, nodeName="n1"), Reference(Kind.CLAIM, "app-data", "team")
    assert missing(on_a_node, Known()) == {Reference(Kind.CLASS, "photos"), claim}
    known = Known(claims={("team", "app-data"): {"spec": {"volumeName": "pv"}}})
    assert missing(on_a_node, known) == {Reference(Kind.VOLUME, "pv")}
    assert missing(pod(inline(), {"name": "x", "emptyDir": {}}), Known()) == {Reference(Kind.TEMPLATE, "s3")}
