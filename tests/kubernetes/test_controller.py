"""Test the manifests of the controller: valid, least rights, Pod Security `restricted`, the same in the chart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest

from fusermount3_controller import (
    admission,
    cli,
    daemon,
    mount_pods,
    pod_annotations,
    pod_volumes,
    rendering,
    volume_templates,
)
from fusermount3_controller.cluster_cache import _WATCHED
from fusermount3_controller.pod_rules import SOCKET_VARIABLE
from fusermount3_controller.served_volumes import Kind
from fusermount3_controller.template_parameters import TEMPLATE_ATTRIBUTE
from fusermount3_controller.webhook import CHECK, INJECT
from fusermount3_proxy import __version__
from tests.kubernetes.objects import (
    CHART,
    CONTROLLER,
    KUSTOMIZATION,
    NEWEST,
    PROVISIONING,
    Object,
    containers,
    definition,
    is_pulled_once,
    name_of,
    objects,
    of_files,
    the,
    validate,
)
from tests.kubernetes.rendered import OLD_DRIVER, rendered_by_helm, rendered_by_kustomize
from tests.lab.commands import CommandFailed

if TYPE_CHECKING:
    from pathlib import Path

NAME, MOUNTS = "fusermount3-controller", "fuse-mounts"
#: The first Kubernetes with all kinds in their present version.
OLDEST = "1.30"
OBJECTS = of_files([path for path in sorted(CONTROLLER.glob("*.yaml")) if path.name != KUSTOMIZATION])
DEPLOYMENT = the("Deployment", OBJECTS)
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = containers(POD)
WEBHOOKS = {each["name"].partition(".")[0]: each for each in the("MutatingWebhookConfiguration", OBJECTS)["webhooks"]}
(CHECKING,) = the("ValidatingWebhookConfiguration", OBJECTS)["webhooks"]
SECRET = the("Secret", OBJECTS)
ENABLED = ("--set=controller.enabled=true", "--kube-version", OLDEST)


def named(kind: str, name: str) -> Object:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def options() -> dict[str, str]:
    return dict(word.removeprefix("--").split("=") for word in CONTAINER["args"] if word.startswith("--"))


@pytest.mark.parametrize("each", OBJECTS, ids=name_of)
def test_an_object_is_valid(each: Object) -> None:
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(each, version, strict=True)


def test_it_is_started_with_options_that_it_has_and_names_that_exist() -> None:
    command, *_ = CONTAINER["args"]
    known = {word.removeprefix("--") for each in cli.commands.commands[command].params for word in each.opts}
    assert options().keys() <= known
    assert options()["secret"] == SECRET["metadata"]["name"]
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert options()["configuration"] == the(kind, OBJECTS)["metadata"]["name"]
    service = the("Service", OBJECTS)
    assert options()["service"] == service["metadata"]["name"]
    ports = {each["name"]: str(each["containerPort"]) for each in CONTAINER["ports"]}
    assert ports == {"webhook": options()["port"], "health": options()["health-port"]}
    (port,) = service["spec"]["ports"]
    named = {"name": service["metadata"]["name"], "namespace": service["metadata"]["namespace"], "port": port["port"]}
    for each in WEBHOOKS.values():
        assert each["clientConfig"]["service"] == {**named, "path": INJECT}
    assert CHECKING["clientConfig"]["service"] == {**named, "path": CHECK}


def test_all_that_is_in_a_namespace_is_in_its_own_two_which_are_restricted() -> None:
    namespaces = [each["metadata"] for each in OBJECTS if each["kind"] == "Namespace"]
    assert {each["name"] for each in namespaces} == {NAME, MOUNTS}
    for each in namespaces:
        assert each["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    used = {each["metadata"]["namespace"] for each in OBJECTS if "namespace" in each["metadata"]}
    assert used == {NAME, MOUNTS}


def test_the_pod_passes_restricted_and_writes_nowhere() -> None:
    assert POD["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"volumes", "hostNetwork", "hostPID", "hostIPC"} & POD["spec"].keys()


def test_two_run_and_one_of_them_whatever_is_drained() -> None:
    assert DEPLOYMENT["spec"]["replicas"] == 2
    assert DEPLOYMENT["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    budget = the("PodDisruptionBudget", OBJECTS)["spec"]
    assert budget["minAvailable"] == 1
    labels = POD["metadata"]["labels"]
    selectors = [budget["selector"]["matchLabels"], DEPLOYMENT["spec"]["selector"]["matchLabels"]]
    assert [*selectors, the("Service", OBJECTS)["spec"]["selector"]] == [labels] * 3


def test_it_may_read_what_it_watches_and_write_what_is_its_own() -> None:
    readable, rest = set(), []
    for rule in named("ClusterRole", NAME)["rules"]:
        if rule["verbs"] == ["get", "list", "watch"]:
            readable |= {(group, plural) for group in rule["apiGroups"] for plural in rule["resources"]}
        else:
            rest.append((rule["resources"], rule["verbs"], rule.get("resourceNames")))
    configurations = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"]
    assert rest == [
        ([mount_pods.ATTACHMENTS], ["create", "delete"], None),
        ([f"{mount_pods.ATTACHMENTS}/status"], ["patch"], None),
        (["events"], ["create"], None),
        (configurations, ["get", "patch"], [options()["configuration"]]),
    ]
    watched = {kind: each.resource._api_info for kind, each in _WATCHED.items()}
    provisioning = watched[Kind.POD_VOLUME]
    assert readable == {(each.resource.group, each.plural) for each in watched.values() if each is not provisioning}
    assert watched.keys() == set(Kind)
    rule, of_lease = the("Role", OBJECTS)["rules"]
    assert (of_lease["resources"], of_lease["verbs"]) == (["leases"], ["get", "patch"])
    lease = the("Lease", OBJECTS)
    assert of_lease["resourceNames"] == [lease["metadata"]["name"]] == [options()["lease"]]
    # Applied again, it leaves the Lease to its holder.
    assert "spec" not in lease
    assert (rule["resources"], rule["verbs"]) == (["secrets"], ["get", "patch"])
    assert rule["resourceNames"] == [SECRET["metadata"]["name"]]
    assert "data" not in SECRET and "stringData" not in SECRET


def test_it_writes_volumes_only_if_it_is_to_create_them() -> None:
    found = of_files([PROVISIONING / "rbac.yaml"])
    assert [(rule["resources"], rule["verbs"]) for rule in the("ClusterRole", found)["rules"]] == [
        ([pod_volumes.PLURAL], ["get", "list", "watch", "create", "delete", "patch"]),
        (["volumetemplates", "volumetemplates/status"], ["patch"]),
        ([f"{pod_volumes.PLURAL}/status"], ["patch"]),
        (["persistentvolumes"], ["create", "delete", "patch"]),
        (["nodes"], ["get"]),
        (["persistentvolumeclaims/status"], ["patch"]),
    ]
    role = the("Role", found)
    assert (role["metadata"]["namespace"], role["rules"]) == (
        MOUNTS,
        [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}],
    )
    for each in found:
        validate(each)
    (patch,) = objects((PROVISIONING / KUSTOMIZATION).read_text())[0]["patches"]
    assert "value: --provisioning" in patch["patch"]


@pytest.mark.e2e
def test_the_chart_creates_volumes_if_it_is_told_to(kustomize: Path, helm: Path) -> None:
    ours = rendered_by_kustomize(kustomize, PROVISIONING)
    del ours[f"Namespace {NAME}"]
    settings = (*ENABLED, "--set=controller.provisioning=true")
    enabled = rendered_by_helm(helm, *settings, release=NAME, namespace=NAME)
    without = rendered_by_helm(helm, release=NAME, namespace=NAME)
    assert enabled == ours | without


def test_it_makes_pods_in_the_namespace_of_mount_pods_only() -> None:
    """What it reads of others' pods, it can't change. In other namespaces, an administrator has to say so."""
    with_pods = [each for each in OBJECTS for rule in each.get("rules", []) if "pods" in rule.get("resources", [])]
    assert [each["metadata"]["name"] for each in with_pods if each["kind"] == "ClusterRole"] == [
        NAME,
        f"{NAME}-mount-pods",
    ]
    (rule,) = named("ClusterRole", f"{NAME}-mount-pods")["rules"]
    assert (rule["apiGroups"], rule["verbs"]) == ([""], ["create", "delete"])
    bound = [each for each in OBJECTS if each.get("roleRef", {}).get("name") == f"{NAME}-mount-pods"]
    assert [(each["kind"], each["metadata"]["namespace"]) for each in bound] == [("RoleBinding", MOUNTS)]


def test_the_namespace_of_mount_pods_is_that_of_the_code_and_closed() -> None:
    assert options()["mount-namespace"] == MOUNTS == rendering.SHARED_NAMESPACE
    (option,) = [each for each in cli.commands.commands["webhook"].params if each.name == "mount_namespace"]
    assert option.default == MOUNTS
    policy, quota = (the(kind, OBJECTS) for kind in ("NetworkPolicy", "ResourceQuota"))
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert {each["metadata"]["namespace"] for each in (policy, quota)} == {MOUNTS}
    priority = the("PriorityClass", OBJECTS)
    assert priority["metadata"]["name"] == rendering.PRIORITY_CLASS
    assert priority["preemptionPolicy"] == "PreemptLowerPriority"


def test_a_pod_that_declines_a_sidecar_is_still_checked_for_what_it_shares() -> None:
    conditions = {each["name"]: " ".join(each["expression"].split()) for each in WEBHOOKS["inject"]["matchConditions"]}
    inline = re.search(r"\(has\(object\.spec\.volumes\).*?volume\.csi\.volumeAttributes\)\)", conditions["asks"])
    assert inline
    assert conditions["is-not-declined"].endswith(f"|| {inline[0]}")


def test_only_those_who_ask_wait_for_it() -> None:
    asks, claims = WEBHOOKS["inject"], WEBHOOKS["inject-claims"]
    assert (asks["failurePolicy"], claims["failurePolicy"]) == ("Fail", "Ignore")
    assert claims["timeoutSeconds"] < asks["timeoutSeconds"] <= 5
    for each in (asks, claims):
        assert (each["sideEffects"], each["reinvocationPolicy"]) == ("None", "IfNeeded")
        assert [rule["operations"] for rule in each["rules"]] == [["CREATE"]]
        assert "caBundle" not in each["clientConfig"]
    conditions = {each["name"]: each["expression"] for hook in (asks, claims) for each in hook["matchConditions"]}
    assert conditions["does-not-ask"] == f"!({conditions['asks']})"
    for name in (pod_annotations.INJECT, rendering.DRIVER, TEMPLATE_ATTRIBUTE, SOCKET_VARIABLE):
        assert f"'{name}'" in conditions["asks"]


def test_templates_are_checked() -> None:
    (rule,) = CHECKING["rules"]
    assert (CHECKING["failurePolicy"], CHECKING["sideEffects"]) == ("Fail", "None")
    spec = definition(volume_templates.KIND, OBJECTS)["spec"]
    assert (rule["apiGroups"], rule["resources"]) == ([spec["group"]], [spec["names"]["plural"]])
    assert rule["apiVersions"] == [each["name"] for each in spec["versions"]]
    assert rule["operations"] == ["CREATE", "UPDATE"]


def test_the_policy_knows_a_sidecar_by_what_each_has() -> None:
    policy = the("ValidatingAdmissionPolicy", OBJECTS)["spec"]
    for expression in (policy["matchConditions"][0], policy["variables"][0]):
        assert f"'{SOCKET_VARIABLE}'" in expression["expression"]
    message = " ".join(policy["validations"][0]["messageExpression"].split())
    assert admission.STRIPPED.replace('"Always"', '"restartPolicy: Always"') in message
    binding = the("ValidatingAdmissionPolicyBinding", OBJECTS)["spec"]
    policy_name = the("ValidatingAdmissionPolicy", OBJECTS)["metadata"]["name"]
    assert binding == {"policyName": policy_name, "validationActions": ["Deny"]}


def test_it_ends_before_kubelet_kills_it() -> None:
    assert POD["spec"]["terminationGracePeriodSeconds"] > daemon.LINGER + daemon._SHUTDOWN
    assert f"takes requests for {daemon.LINGER:.0f} seconds more" in (CONTROLLER / "deployment.yaml").read_text()


@pytest.mark.e2e
def test_the_image_is_that_of_this_version(kustomize: Path, helm: Path) -> None:
    for rendered in (rendered_by_kustomize(kustomize, CONTROLLER), rendered_by_helm(helm, *ENABLED)):
        (container,) = containers(rendered[f"Deployment {NAME}"]["spec"]["template"])
        assert container["image"] == f"{NAME}:{__version__}"
        assert is_pulled_once(container["image"])


@pytest.mark.e2e
def test_the_chart_has_the_same_if_it_is_enabled(kustomize: Path, helm: Path) -> None:
    ours = rendered_by_kustomize(kustomize, CONTROLLER)
    del ours[f"Namespace {NAME}"]
    enabled = rendered_by_helm(helm, *ENABLED, release=NAME, namespace=NAME)
    without = rendered_by_helm(helm, release=NAME, namespace=NAME)
    assert enabled == ours | without
    assert not ours.keys() & without.keys()


@pytest.mark.e2e
def test_the_chart_names_its_own_namespace_and_settings(helm: Path) -> None:
    settings = (
        *("--set=controller.replicas=3", "--set=imagePullSecrets[0].name=pull", "--set=imagePullPolicy=Always"),
        *("--set=images.controller.repository=registry/c", "--set=controller.resources.limits.memory=1Gi"),
        "--set=controller.mountNamespace=mounts",
    )
    rendered = rendered_by_helm(helm, *ENABLED, *settings, release="name", namespace="elsewhere")
    for each in rendered.values():
        if each["kind"] != "CustomResourceDefinition":
            kubernetes_validate.validate(each, OLDEST, strict=True)
        assert each["metadata"].get("namespace") not in (NAME, MOUNTS)
    (plugin, *_) = containers(the("DaemonSet", list(rendered.values()))["spec"]["template"])
    assert "--mount-namespaces=mounts" in plugin["args"], "or pods there could serve nobody"
    spec = rendered[f"Deployment {NAME}"]["spec"]
    (container,) = containers(spec["template"])
    assert (spec["replicas"], container["imagePullPolicy"]) == (3, "Always")
    assert (container["image"], container["resources"]["limits"]) == (f"registry/c:{__version__}", {"memory": "1Gi"})
    assert spec["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    for webhook in rendered[f"MutatingWebhookConfiguration {NAME}"]["webhooks"]:
        assert webhook["clientConfig"]["service"]["namespace"] == "elsewhere"
    for name in (f"ClusterRoleBinding {NAME}", f"RoleBinding {NAME}", f"RoleBinding {NAME}-mount-pods"):
        assert rendered[name]["subjects"][0]["namespace"] == "elsewhere"
    assert rendered[f"RoleBinding {NAME}-mount-pods"]["metadata"]["namespace"] == "mounts"
    assert "Namespace mounts" in rendered
    assert "--mount-namespace=mounts" in container["args"]


@pytest.mark.e2e
def test_the_chart_lets_the_controller_and_the_driver_use_other_namespaces_of_mount_pods(helm: Path) -> None:
    rendered = rendered_by_helm(helm, *ENABLED, "--set=controller.otherMountNamespaces={fuse-devices}")
    (plugin, *_) = containers(the("DaemonSet", list(rendered.values()))["spec"]["template"])
    assert "--mount-namespaces=fuse-mounts,fuse-devices" in plugin["args"]
    assert rendered[f"RoleBinding {NAME}-mount-pods"]["metadata"]["namespace"] == "fuse-devices", "the last one"
    assert "Namespace fuse-devices" not in rendered


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((f"--set=driverName={OLD_DRIVER}",), "is for the default driverName"),
        (("--kube-version", "1.29.9"), "needs Kubernetes 1.30"),
        (("--set=controller.replicas=0",), "controller.replicas"),
    ],
)
def test_the_chart_refuses_what_can_not_work(helm: Path, settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandFailed, match=f"(?s){says}"):
        rendered_by_helm(helm, *ENABLED, *settings)


@pytest.mark.parametrize("name", ["mountpodattachments.yaml", "podvolumes.yaml", "volumetemplates.yaml"])
def test_the_chart_has_the_resources(name: str) -> None:
    assert (CHART / name).read_text() == (CONTROLLER / name).read_text()
