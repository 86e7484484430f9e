"""What the API server asks before it creates an object, and the answer: an AdmissionReview of v1. Pure.

The answer to a pod is the difference between the pod and what it becomes, as a JSON patch (RFC 6902); the answer to a
VolumeTemplate, whether it can be used. Nothing but the answer comes of a request, so a dry run is answered as any
other; and the answer to a pod that was answered before is no patch.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jsonpatch

from fusermount3_controller import shared_volumes, volume_templates
from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.injection import inject
from fusermount3_controller.manifests import check_pod
from fusermount3_controller.pod_rules import SOCKET_VARIABLE
from fusermount3_controller.served_volumes import Known

API_VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"

#: Of a sidecar; the policy in packaging/kubernetes/controller says the same.
STRIPPED = (
    'a sidecar that serves a volume must have "Always": if that is not missing in the manifest, another mutating '
    "webhook has removed it, and has to be updated to Kubernetes 1.29, or to leave these pods alone"
)

#: Of a refusal, which kubectl prints after the webhook's name (apimachinery, StatusReasonInvalid).
_STATUS = {"code": 422, "reason": "Invalid"}

Manifest = dict[str, Any]


class Request(NamedTuple):
    """An object that is to be created, or changed; a pod has the namespace in which that is."""

    uid: str
    manifest: Manifest


class Answer(NamedTuple):
    """The AdmissionReview that is sent; `result` is what is counted and logged of it, `why` the reason of a refusal."""

    review: Manifest
    result: str
    why: str = ""


#: What can come of a request that is answered.
INJECTED, UNCHANGED, ACCEPTED, REFUSED = RESULTS = ("injected", "unchanged", "accepted", "refused")


def about_pod(review: object) -> Request:
    """Return what an AdmissionReview asks. Raises Invalid if it is none, or not about the creation of a pod."""
    request = _request_of(review, "Pod", ("CREATE",))
    pod = request["object"]
    metadata = pod.get("metadata")
    if not isinstance(metadata, Mapping):
        raise Invalid([Fault("request.object.metadata", "must be an object")])
    # The API server may set the namespace later than it asks: until then, only the request has it.
    namespace = metadata.get("namespace") or request.get("namespace")
    if not isinstance(namespace, str) or not namespace:
        raise Invalid([Fault("request.namespace", f"must be a name, not {quoted(namespace)}")])
    return Request(request["uid"], {**pod, "metadata": {**metadata, "namespace": namespace}})


def about_template(review: object) -> Request:
    """Return what an AdmissionReview asks. Raises Invalid if it is none, or not about a VolumeTemplate."""
    request = _request_of(review, volume_templates.KIND, ("CREATE", "UPDATE"))
    return Request(request["uid"], dict(request["object"]))


def _request_of(review: object, kind: str, operations: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(review, Mapping) or (review.get("apiVersion"), review.get("kind")) != (API_VERSION, KIND):
        raise Invalid([Fault("", f"must be an {KIND} of {API_VERSION}")])
    request = review.get("request")
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise Invalid([Fault("request.uid", "is missing")])
    manifest = request.get("object")
    is_right = isinstance(manifest, Mapping) and manifest.get("kind") == kind
    if not is_right or request.get("operation") not in operations:
        raise Invalid([Fault("request", f"must be {' or '.join(operations)} of a {kind}")])
    return request


def injected(request: Request, known: Known) -> Answer:
    """Return whether the pod may be created, and the patch that makes of it what its volumes need."""
    pod = request.manifest
    try:
        check_pod(pod)
        _check_sidecars(pod)
        shared_volumes.of_new_pod(pod, known)
        result = inject(pod, known)
    except Invalid as error:
        return _refused(request, error)
    patch = jsonpatch.make_patch(pod, result).patch
    if not patch:
        return Answer(_review(request, allowed=True), UNCHANGED)
    encoded = base64.b64encode(json.dumps(patch).encode()).decode()
    return Answer(_review(request, allowed=True, patchType="JSONPatch", patch=encoded), INJECTED)


def checked(request: Request) -> Answer:
    """Return whether the template can be used, and what is wrong with it, by field."""
    if (request.manifest.get("metadata") or {}).get("deletionTimestamp"):
        # It is only let go, by a change of its finalizers, whatever it says.
        return Answer(_review(request, allowed=True), ACCEPTED)
    try:
        volume_templates.parse(request.manifest)
    except Invalid as error:
        return _refused(request, error)
    return Answer(_review(request, allowed=True), ACCEPTED)


def _refused(request: Request, error: Invalid) -> Answer:
    why = "; ".join(map(str, error.faults))
    return Answer(_review(request, allowed=False, status={**_STATUS, "message": why}), REFUSED, why)


def _check_sidecars(pod: Manifest) -> None:
    """A webhook that is called after this one may drop what it does not know; then the API server asks again.

    It would refuse the pod itself, for the startup probe of an init container, but not say what has happened.
    """
    for index, container in enumerate(pod["spec"].get("initContainers") or []):
        names = {variable.get("name") for variable in container.get("env") or []}
        if SOCKET_VARIABLE in names and container.get("restartPolicy") != "Always":
            raise Invalid([Fault(f"spec.initContainers[{index}].restartPolicy", STRIPPED)])


def _review(request: Request, **response: Any) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": KIND, "response": {"uid": request.uid, **response}}
