"""What the API server asks before it creates a pod, and the answer: an AdmissionReview of admission.k8s.io/v1. Pure.

The answer is the difference between the pod and what it becomes, as a JSON patch (RFC 6902). Nothing but the answer
comes of a request, so a dry run is answered as any other; and the answer to a pod that was answered before is no patch.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jsonpatch

from fusermount3_controller.faults import Fault, Invalid, quoted
from fusermount3_controller.injection import inject
from fusermount3_controller.manifests import check_pod
from fusermount3_controller.served_volumes import Known, uses
from fusermount3_controller.volume_templates import Placement

API_VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"

#: Of a refusal, which kubectl prints after the webhook's name (apimachinery, StatusReasonInvalid).
_STATUS = {"code": 422, "reason": "Invalid"}

Manifest = dict[str, Any]


class Request(NamedTuple):
    """A pod that is to be created; `pod` has the namespace in which that is."""

    uid: str
    pod: Manifest


class Answer(NamedTuple):
    """The AdmissionReview that is sent; `result` is what is counted and logged of it, `why` the reason of a refusal."""

    review: Manifest
    result: str
    why: str = ""


#: What can come of a request that is answered.
INJECTED, UNCHANGED, REFUSED = RESULTS = ("injected", "unchanged", "refused")


def request_of(review: object) -> Request:
    """Return what an AdmissionReview asks. Raises Invalid if it is none, or not about the creation of a pod."""
    if not isinstance(review, Mapping) or (review.get("apiVersion"), review.get("kind")) != (API_VERSION, KIND):
        raise Invalid([Fault("", f"must be an {KIND} of {API_VERSION}")])
    request = review.get("request")
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise Invalid([Fault("request.uid", "is missing")])
    pod = request.get("object")
    if not isinstance(pod, Mapping) or pod.get("kind") != "Pod" or request.get("operation") != "CREATE":
        raise Invalid([Fault("request", "must be about the creation of a pod")])
    metadata = pod.get("metadata")
    if not isinstance(metadata, Mapping):
        raise Invalid([Fault("request.object.metadata", "must be an object")])
    # The API server may set the namespace later than it asks: until then, only the request has it.
    namespace = metadata.get("namespace") or request.get("namespace")
    if not isinstance(namespace, str) or not namespace:
        raise Invalid([Fault("request.namespace", f"must be a name, not {quoted(namespace)}")])
    return Request(request["uid"], {**pod, "metadata": {**metadata, "namespace": namespace}})


def answer(request: Request, known: Known) -> Answer:
    """Return whether the pod may be created, and the patch that makes of it what its volumes need."""
    try:
        check_pod(request.pod)
        _check_placement(request.pod, known)
        injected = inject(request.pod, known)
    except Invalid as error:
        why = "; ".join(map(str, error.faults))
        return Answer(_review(request, allowed=False, status={**_STATUS, "message": why}), REFUSED, why)
    patch = jsonpatch.make_patch(request.pod, injected).patch
    if not patch:
        return Answer(_review(request, allowed=True), UNCHANGED)
    encoded = base64.b64encode(json.dumps(patch).encode()).decode()
    return Answer(_review(request, allowed=True, patchType="JSONPatch", patch=encoded), INJECTED)


def _check_placement(pod: Manifest, known: Known) -> None:
    """A pod with a volume that nobody serves would wait for ever, and nothing would say for what."""
    for use in uses(pod, known):
        if use.template.placement is Placement.SHARED:
            why = f"the template '{use.template.name}' has placement Shared, which no controller runs so far"
            raise Invalid([Fault(f"the volume '{use.volume}'", why)])


def _review(request: Request, **response: Any) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": KIND, "response": {"uid": request.uid, **response}}
