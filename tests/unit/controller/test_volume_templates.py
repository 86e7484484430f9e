"""VolumeTemplates: what is accepted, and what is said about each field that is not."""

from __future__ import annotations

from typing import Any

import pytest

from fusermount3_broker.csi import volume_requests
from fusermount3_controller import template_parameters, volume_templates
from fusermount3_controller.faults import Invalid
from fusermount3_controller.label_selectors import Requirement
from fusermount3_controller.volume_templates import Identity, Placement, Sharing, Upgrade, parse
from tests.unit.controller.samples import Manifest, pod_of, template

SPEC = "spec.volumeStaging.podTemplate.spec"
FUSE = f"{SPEC}.containers[0]"


def faults_of(manifest: Manifest) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        parse(manifest)
    return {fault.field: fault.text for fault in caught.value.faults}


def test_a_template_is_parsed() -> None:
    parsed = parse(template("Shared"))
    assert (parsed.name, parsed.placement) == ("s3", Placement.SHARED)
    assert parsed.parameters["bucket"].required and not parsed.parameters["prefix"].required


def test_the_drivers_attributes_are_known() -> None:
    assert volume_requests.ATTRIBUTES.keys() == template_parameters.DRIVER_ATTRIBUTES


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"kind": "Pod"}, "kind", "must be VolumeTemplate, not 'Pod'"),
        ({"apiVersion": None}, "apiVersion", "must be fusermount3-proxy.dev/v1alpha1, not 'None'"),
        ({"metadata": {"name": "S3"}}, "metadata.name", "must be of at most 63 lower-case letters"),
        ({"metadata": []}, "metadata", "must be an object, not '[]'"),
        ({"speck": {}}, "", "unknown 'speck', did you mean 'spec'?"),
        ({"spec": None}, "spec.placement", "must be Sidecar or Shared, not 'None'"),
        ({"spec": {"placement": "sidecar"}}, "spec.placement", "must be Sidecar or Shared, not 'sidecar'"),
        ({"spec": {"placment": "Sidecar"}}, "spec", "unknown 'placment', did you mean 'placement'?"),
        ({"spec": {}}, "spec.volumeStaging.podTemplate", "is missing"),
    ],
)
def test_a_fault_names_its_field(changes: Manifest, field: str, says: str) -> None:
    assert says in faults_of(template() | changes)[field]


@pytest.mark.parametrize(
    ("name", "parameter", "field", "says"),
    [
        ("a-b", {}, ".a-b", "a name has at most 63 letters, digits and '_'"),
        ("mountOptions", {}, ".mountOptions", "is a volumeAttribute of the driver"),
        ("volumeTemplate", {}, ".volumeTemplate", "is a volumeAttribute of the driver"),
        ("a", {"required": "yes"}, ".a.required", "must be true or false, not 'yes'"),
        ("a", {"default": 1}, ".a.default", "must be a string, in quotes, not '1'"),
        ("a", {"default": "x", "required": True}, ".a.default", "has no effect"),
        ("a", {"default": "x y"}, ".a.default", "'x y' does not match"),
        ("a", {"pattern": "("}, ".a.pattern", "is not a regular expression of RE2: missing ): ("),
        ("a", {"pattern": "(a)\\1"}, ".a.pattern", "is not a regular expression of RE2"),
        ("a", {"pattern": "((a{900}){900}){900}"}, ".a.pattern", "is not a regular expression of RE2"),
        ("a", {"patern": "a"}, ".a", "unknown 'patern', did you mean 'pattern'?"),
        ("a", None, "", ""),
        ("a", "x", ".a", "must be an object, not 'x'"),
    ],
)
def test_a_parameter_is_checked(name: str, parameter: Any, field: str, says: str) -> None:
    manifest = template()
    manifest["spec"]["parameters"][name] = parameter
    if not field:
        assert parse(manifest).parameters[name] == template_parameters.Parameter()
        return
    assert says in faults_of(manifest)[f"spec.parameters{field}"]


@pytest.mark.parametrize(
    ("container", "field", "says"),
    [
        ({"name": "s3fs"}, ".name", "must be 'fuse', not 's3fs'"),
        ({"image": None}, ".image", "is missing"),
        ({"imag": "x"}, "", "unknown 'imag', did you mean 'image'?"),
        ({"restartPolicy": "Never"}, "", "unknown 'restartPolicy'"),
        ({"args": ["{{ params.bukcet }}"]}, ".args[0]", "params.bukcet is not in spec.parameters"),
        ({"args": ["a", "{{ ''.__class__ }}"]}, ".args[1]", "is not allowed"),
        ({"command": ["sh", "-ec", "s3fs {{ params.bucket }}"]}, ".command[2]", "must end with `| tobash`"),
        ({"command": ["/bin/sh"], "args": ["-c", "{{ params.bucket }}"]}, ".args[1]", "must end with `| tobash`"),
        ({"securityContext": {"privileged": True}}, ".securityContext.privileged", "must be false"),
        ({"securityContext": {"allowPrivilegeEscalation": True}}, ".securityContext.allowPrivilegeEscalation", "false"),
        ({"securityContext": {"runAsNonRoot": False}}, ".securityContext.runAsNonRoot", "must be true"),
        ({"securityContext": {"runAsUser": 0}}, ".securityContext.runAsUser", "must not be 0"),
        ({"securityContext": {"procMount": "Unmasked"}}, ".securityContext.procMount", 'must be "Default"'),
        (
            {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}},
            ".securityContext.capabilities.add",
            "needs no capability",
        ),
        ({"securityContext": {"capabilities": {"drop": []}}}, ".securityContext.capabilities.drop", "must be [ALL]"),
        (
            {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
            ".securityContext.seccompProfile.type",
            "Localhost or RuntimeDefault",
        ),
        (
            {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
            ".securityContext.appArmorProfile.type",
            "Localhost or RuntimeDefault",
        ),
        ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, ".securityContext.seLinuxOptions.type", "one of"),
        ({"securityContext": {"seLinuxOptions": {"user": "u"}}}, ".securityContext.seLinuxOptions", "no user"),
        ({"securityContext": {"windowsOptions": {}}}, ".securityContext.windowsOptions", "is for Linux"),
        ({"securityContext": {"runAsUser": "{{ fsGroup }}"}}, ".securityContext.runAsUser", "must be written out"),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, ".ports[0].hostPort", "does not allow ports of the node"),
        ({"livenessProbe": {"httpGet": {"host": "x", "port": 1}}}, ".livenessProbe.httpGet.host", "another host"),
        (
            {"lifecycle": {"preStop": {"tcpSocket": {"host": "x", "port": 1}}}},
            ".lifecycle.preStop.tcpSocket.host",
            "another host",
        ),
        ({"volumeMounts": [{"name": "x", "mountPath": "/x"}]}, ".volumeMounts[0].name", "no volume 'x'"),
        ({"volumeMounts": [{"name": "c", "mountPath": "x"}]}, ".volumeMounts[0].mountPath", "an absolute path"),
        ({"volumeMounts": [{"name": "c", "mountPath": "/mnt/"}]}, ".volumeMounts[0].mountPath", "of the controller"),
        (
            {"volumeMounts": [{"name": "c", "mountPath": "/c", "mountPropagation": "Bidirectional"}]},
            ".volumeMounts[0].mountPropagation",
            "needs none",
        ),
        ({"resources": "x"}, ".resources", "must be an object, not 'x'"),
        ({"resources": {"limits": [1]}}, ".resources.limits", "must be an object"),
        ({"volumeMounts": ["c"]}, ".volumeMounts[0]", "must be an object, not 'c'"),
        ({"volumeMounts": "c"}, ".volumeMounts", "must be a list, not 'c'"),
        (
            {"env": [{"name": "FUSERMOUNT3PROXY_FDPASSING_SOCKPATH", "value": "/x"}]},
            ".env[0].name",
            "the controller sets this",
        ),
    ],
)
def test_a_container_is_checked(container: Manifest, field: str, says: str) -> None:
    manifest = template()
    pod_of(manifest)["containers"][0] |= container
    pod_of(manifest)["volumes"] = [{"name": "c", "emptyDir": {}}]
    assert says in faults_of(manifest)[FUSE + field]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"hostNetwork": True}, ".hostNetwork", "a template can't decide this"),
        ({"nodeName": "n"}, ".nodeName", "a template can't decide this"),
        ({"initContainers": []}, ".initContainers", "a template can't decide this"),
        ({"containers": []}, ".containers", "must be one container, with the name 'fuse'"),
        ({"containers": ["x"]}, ".containers", "must be one container, with the name 'fuse'"),
        ({"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}, ".volumes[0].hostPath", "does not allow it"),
        ({"volumes": [{"name": "h"}]}, ".volumes[0]", "must have a name and one type"),
        ({"volumes": [{"name": "mountpoint", "emptyDir": {}}]}, ".volumes[0].name", "choose another one"),
        ({"volumes": [{"name": "{{ mountpoint }}", "emptyDir": {}}]}, ".volumes[0].name", "written out"),
        ({"securityContext": {"runAsUser": 0}}, ".securityContext.runAsUser", "must not be 0"),
        ({"securityContext": {"sysctls": [{"name": "a"}]}}, ".securityContext.sysctls", "needs none"),
        ({"terminationGracePeriodSeconds": 0}, ".terminationGracePeriodSeconds", "a number of seconds, not '0'"),
    ],
)
def test_a_pod_is_checked(changes: Manifest, field: str, says: str) -> None:
    manifest = template("Shared")
    pod_of(manifest).update(changes)
    assert says in faults_of(manifest)[SPEC + field]


def test_a_sidecar_leaves_the_pod_to_its_author() -> None:
    manifest = template()
    pod_of(manifest)["serviceAccountName"] = "s3"
    assert faults_of(manifest) == {f"{SPEC}.serviceAccountName": "a sidecar is a part of a pod that decides this"}
    manifest = template("Shared")
    pod_of(manifest)["serviceAccountName"] = "s3"
    parse(manifest)


# What is shared


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("identity", "Pod", "must be Template or ServiceAccount, not 'Pod'"),
        ("identity", ["Template"], "must be Template or ServiceAccount"),
        ("upgrade", "Never", "must be OnIdle or Replace, not 'Never'"),
        ("allowInline", "yes", "must be true or false, not 'yes'"),
        ("idleSeconds", -1, "must be 0 to 86400 seconds, not '-1'"),
        ("idleSeconds", True, "must be 0 to 86400 seconds"),
        ("idleSeconds", 86401, "must be 0 to 86400 seconds"),
        ("allowedNamespaces", ["team"], "must be an object"),
        ("allowedNamespaces", {"matchLabel": {}}, "unknown 'matchLabel', did you mean 'matchLabels'?"),
    ],
)
def test_what_is_shared_is_checked(field: str, value: Any, says: str) -> None:
    manifest = template("Shared")
    manifest["spec"][field] = value
    assert says in faults_of(manifest)[f"spec.{field}"]


def test_what_is_shared_has_careful_defaults() -> None:
    assert parse(template("Shared")).sharing == Sharing(Identity.TEMPLATE, (), False, 0, Upgrade.ON_IDLE)


def test_what_is_shared_is_parsed() -> None:
    manifest = template("Shared")
    manifest["metadata"]["generation"] = 3
    manifest["spec"] |= {"identity": "ServiceAccount", "upgrade": "Replace", "allowInline": True, "idleSeconds": 60}
    manifest["spec"]["allowedNamespaces"] = {"matchLabels": {"team": "a"}}
    parsed = parse(manifest)
    assert parsed.generation == 3
    selector = (Requirement("team", "In", ("a",)),)
    assert parsed.sharing == Sharing(Identity.SERVICE_ACCOUNT, selector, True, 60, Upgrade.REPLACE)


@pytest.mark.parametrize("field", volume_templates.SHARING_FIELDS)
def test_a_sidecar_shares_nothing(field: str) -> None:
    manifest = template()
    manifest["spec"][field] = None
    assert "has no effect with placement Sidecar" in faults_of(manifest)[f"spec.{field}"]


def with_namespace(namespace: Any, **spec: Any) -> Manifest:
    manifest = template("Shared")
    manifest["spec"] |= spec
    manifest["spec"]["volumeStaging"]["namespace"] = namespace
    return manifest


@pytest.mark.parametrize(
    ("namespace", "spec", "says"),
    [
        ("fuse-devices", {"placement": "Sidecar"}, "has no effect with placement Sidecar"),
        ("fuse-devices", {"identity": "ServiceAccount"}, "has no effect with identity ServiceAccount"),
        ("Devices", {}, "must be the name of a namespace, not 'Devices'"),
        (1, {}, "must be the name of a namespace, not '1'"),
    ],
)
def test_a_namespace_of_mount_pods_is_checked(namespace: Any, spec: Manifest, says: str) -> None:
    assert says in faults_of(with_namespace(namespace, **spec))["spec.volumeStaging.namespace"]


def test_in_a_namespace_of_administrators_the_api_server_says_what_is_allowed() -> None:
    """But no user says what of the node a pod has, or which privileges, and the node is still chosen by its users."""
    manifest = with_namespace("fuse-devices")
    pod_of(manifest)["volumes"] = [{"name": "h", "hostPath": {"path": "/srv"}}]
    pod_of(manifest)["containers"][0]["securityContext"] = {"privileged": True, "runAsUser": 0}
    parsed = parse(manifest)
    assert (parsed.namespace, parse(with_namespace(None)).namespace) == ("fuse-devices", "")
    pod_of(manifest)["volumes"][0]["hostPath"]["path"] = "/srv/{{ params.bucket }}"
    pod_of(manifest)["containers"][0]["securityContext"]["runAsUser"] = "{{ fsGroup }}"
    pod_of(manifest)["hostNetwork"] = True
    assert faults_of(manifest) == {
        f"{SPEC}.volumes[0].hostPath.path": "must be written out: no expression decides what of the node a pod has",
        f"{FUSE}.securityContext.runAsUser": "must be written out: no expression decides what is allowed",
        f"{SPEC}.hostNetwork": "a template can't decide this",
    }


def test_a_program_has_one_account() -> None:
    manifest = template("Shared")
    manifest["spec"]["identity"] = "ServiceAccount"
    parse(manifest)
    pod_of(manifest)["serviceAccountName"] = "s3"
    assert "with identity ServiceAccount" in faults_of(manifest)[f"{SPEC}.serviceAccountName"]


def test_labels_are_an_object() -> None:
    manifest = template("Shared")
    manifest["spec"]["volumeStaging"]["podTemplate"]["metadata"] = {"labels": "x"}
    assert faults_of(manifest) == {"spec.volumeStaging.podTemplate.metadata.labels": "must be an object, not 'x'"}


def test_all_faults_are_told_at_once() -> None:
    manifest = template(image="", args=["{{ x }}"])
    manifest["kind"] = "x"
    assert set(faults_of(manifest)) == {"kind", f"{FUSE}.image", f"{FUSE}.args[0]"}


def test_a_template_has_a_limit() -> None:
    assert "more than 65536 characters" in faults_of(template(args=["x" * 70000]))["spec.volumeStaging.podTemplate"]


# What users say


def said(given: dict[str, Any]) -> str:
    with pytest.raises(Invalid) as caught:
        volume_templates.values(parse(template()), given, "volumeAttributes")
    return str(caught.value)


def test_values_are_those_of_the_user_or_the_defaults() -> None:
    manifest = template()
    manifest["spec"]["parameters"]["region"] = {"default": "us-east-1"}
    values = volume_templates.values(parse(manifest), {"bucket": "photos"}, "volumeAttributes")
    assert values == {"bucket": "photos", "prefix": "", "region": "us-east-1"}


def test_what_a_user_may_not_say_is_refused() -> None:
    assert said({"bukcet": "photos"}) == (
        "volumeAttributes: the template 's3': unknown 'bukcet', did you mean 'bucket'?; "
        "volumeAttributes: the template 's3' needs the parameter 'bucket'"
    )
    assert said({"bucket": "p"}) == "volumeAttributes.bucket: 'p' does not match [a-z0-9.-]{3,63}"
    assert said({"bucket": 7}) == "volumeAttributes.bucket: must be a string, in quotes, not '7'"
    assert "more than 1024 characters" in said({"bucket": "p" * 1025})


@pytest.mark.parametrize("value", ["-o", "a,b", "a b", "a'b", "a\nb", "a;b", "$(x)", "é", "a*"])
def test_without_a_pattern_a_value_is_one_plain_word(value: str) -> None:
    assert "volumeAttributes.prefix: " in said({"bucket": "photos", "prefix": value})


def test_a_pattern_takes_no_time_that_a_user_could_make_long() -> None:
    manifest = template()
    manifest["spec"]["parameters"]["bucket"] = {"pattern": "(a+)+b"}
    with pytest.raises(Invalid, match="does not match"):
        volume_templates.values(parse(manifest), {"bucket": "a" * 1024}, "volumeAttributes")
