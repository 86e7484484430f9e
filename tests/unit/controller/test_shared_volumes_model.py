"""Two controllers and a cluster that does what it likes: pods come, end and fail, and each controller sees it late.

The cluster is a model of the API server, scheduler, kubelet, garbage collector and node plugin. A controller sees a past
state of pods, of attachments and of the template, each as old as it may be; it makes one request at a time, and may
crash between any two. hypothesis looks for an order of events after which one of the promises is broken.
"""

from __future__ import annotations

import copy
import datetime
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from fusermount3_controller import mount_pods
from fusermount3_controller.mount_pod_steps import CreatePod, DeleteAttachment, DeletePod, SetStatus, steps
from fusermount3_controller.mount_pods import Phase, existing, moment
from fusermount3_controller.wanted_mount_pods import wanted
from tests.unit.controller.cluster import NOW, at, known, user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fusermount3_controller.mount_pod_steps import Step
    from fusermount3_controller.mount_pods import Existing
    from fusermount3_controller.served_volumes import Known
    from tests.unit.controller.samples import Manifest

#: After so many rounds in which everybody does what is to be done, nothing may be left to do.
ROUNDS = 12
GROUPS = (None, 1000)


class Views(NamedTuple):
    """What there is, or was: pods and attachments by name, and the cluster's template."""

    pods: Mapping[str, Manifest]
    attachments: Mapping[str, Manifest]
    cluster: Known


class Controller:
    """`seen`: how many states it has seen of each of the three histories; `requests`: what it is about to do."""

    def __init__(self) -> None:
        self.seen = [0, 0, 0]
        self.requests: list[Callable[[], None]] = []


class Model:
    """The cluster; `borrowed`: by the UID of each user with a filesystem, the UID of the mount pod that serves it."""

    def __init__(self, upgrade: str, idle: int) -> None:
        self.upgrade, self.idle, self.generation, self.seconds, self.uids = upgrade, idle, 1, 0.0, 0
        self.histories: tuple[list[dict[str, Manifest]], list[dict[str, Manifest]], list[Known]] = (
            [{}],
            [{}],
            [self._known()],
        )
        self.borrowed: dict[str, str] = {}
        self.killed: set[str] = set()
        self.controllers = (Controller(), Controller())

    # The API server

    @property
    def now(self) -> Views:
        return Views(self.histories[0][-1], self.histories[1][-1], self.histories[2][-1])

    def put(self, name: str, manifest: Manifest | None, kind: int = 0) -> None:
        """Write a pod or, of kind 1, an attachment; None: remove it."""
        state = dict(self.histories[0 if kind == 0 else 1][-1])
        if manifest is None:
            state.pop(name)
        else:
            state[name] = copy.deepcopy(manifest)
        (self.histories[0] if kind == 0 else self.histories[1]).append(state)

    def change(self, name: str, **status: object) -> None:
        pod = copy.deepcopy(self.now.pods[name])
        pod["status"] |= status
        self.put(name, pod)

    def end(self, name: str) -> None:
        """Delete a pod as the API server does, which kubelet or nobody has to end first."""
        pod = copy.deepcopy(self.now.pods[name])
        pod["metadata"].setdefault("deletionTimestamp", at(self.seconds))
        self.put(name, pod)

    def edit(self) -> None:
        self.generation += 1
        self.histories[2].append(self._known())

    def _known(self) -> Known:
        return known(self.generation, upgrade=self.upgrade, idleSeconds=self.idle)

    def uid(self) -> str:
        self.uids += 1
        return f"uid {self.uids}"

    def users(self) -> Iterator[Manifest]:
        yield from (pod for pod in self.now.pods.values() if not existing(pod))

    def mounts(self) -> Iterator[Existing]:
        yield from filter(None, map(existing, self.now.pods.values()))

    def key_of(self, mount: Existing) -> tuple[str, str]:
        pod = self.now.pods[mount.name]
        return self.node_of(pod), pod["spec"]["volumes"][-1]["csi"]["volumeAttributes"]["share"]

    @staticmethod
    def node_of(pod: Manifest) -> str:
        (affinity,) = pod["spec"]["affinity"]["nodeAffinity"].values()
        return str(affinity["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])

    # kubelet and the node plugin

    def attach(self, pod: Manifest) -> None:
        """Give a user what is served, if anything is; of two, what was made of the newer template."""
        (place,) = wanted([pod], self.now.cluster).mounts
        served = [each for each in self.mounts() if self._serves(each) and self.key_of(each) == place]
        if served:
            newest = max(served, key=lambda each: (moment(each.created), each.number))
            self.borrowed[pod["metadata"]["uid"]] = newest.uid

    def _serves(self, mount: Existing) -> bool:
        """Return whether a FUSE program serves: also while the pod waits for its users."""
        conditions = self.now.pods[mount.name]["status"].get("conditions") or []
        is_over = mount.phase is Phase.FAILED
        return not is_over and any(each["type"] == "Ready" for each in conditions)

    def detach(self, uid: str) -> None:
        self.borrowed.pop(uid, None)

    def serve(self, mount: Existing) -> None:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": at(self.seconds)}
        self.change(mount.name, phase="Running", conditions=[ready])

    def lose(self, mount: Existing) -> None:
        """Its users have nothing any more, until another pod serves them."""
        self.borrowed = {user: source for user, source in self.borrowed.items() if source != mount.uid}

    def work(self) -> None:
        """Do all that kubelet, the node plugin and the garbage collector have to do."""
        for pod in list(self.users()):
            if pod["metadata"].get("deletionTimestamp"):
                self.detach(pod["metadata"]["uid"])
                self.put(pod["metadata"]["name"], None)
        owners = {each["metadata"]["uid"] for each in self.now.attachments.values()}
        for mount in list(self.mounts()):
            if self.now.pods[mount.name]["metadata"]["ownerReferences"][0]["uid"] not in owners:
                self.end(mount.name)
        for mount in list(self.mounts()):
            if mount.phase is Phase.PENDING:
                self.serve(mount)
            elif mount.phase is Phase.ENDING and (
                mount.uid not in self.borrowed.values() or mount.uid in self.killed
            ):
                self.lose(mount)
                self.put(mount.name, None)
        for pod in list(self.users()):
            if pod["status"]["phase"] in ("Pending", "Running") and pod["metadata"]["uid"] not in self.borrowed:
                self.attach(pod)
                if pod["metadata"]["uid"] in self.borrowed:
                    self.change(pod["metadata"]["name"], phase="Running")

    # A controller

    def view(self, controller: Controller) -> Views:
        pods, attachments, cluster = controller.seen
        return Views(self.histories[0][pods], self.histories[1][attachments], self.histories[2][cluster])

    def look(self, controller: Controller) -> list[Step]:
        """Have it decide by what it has seen."""
        view = self.view(controller)
        pods = list(view.pods.values())
        now = NOW + datetime.timedelta(seconds=self.seconds)
        found = list(filter(None, map(existing, pods)))
        result = steps(wanted(pods, view.cluster), found, view.attachments.values(), now)
        if view == self.now:
            for step in result:
                if isinstance(step, DeletePod):
                    self._check(step.pod)
        controller.requests = [request for step in result for request in self._requests(step)]
        return result

    def _check(self, pod: Existing) -> None:
        """Whoever sees everything takes a pod that serves from its users only if another one serves them then."""
        if pod.uid not in self.borrowed.values():
            return
        others = [each for each in self.mounts() if each.uid != pod.uid and each.phase is Phase.SERVED]
        others = [each for each in others if self.key_of(each) == self.key_of(pod)]
        assert others
        assert self.upgrade == "Replace" or any(each.base == pod.base for each in others)

    def _requests(self, step: Step) -> Iterator[Callable[[], None]]:
        match step:
            case CreatePod(mount, number):
                owner: list[str] = []

                def create_attachment() -> None:
                    if mount.name not in self.now.attachments:
                        manifest = mount_pods.attachment(mount)
                        manifest["metadata"] |= {"uid": self.uid(), "creationTimestamp": at(self.seconds)}
                        self.put(mount.name, manifest, 1)
                    owner.append(self.now.attachments[mount.name]["metadata"]["uid"])

                def create_pod() -> None:
                    name = f"{mount.name}-{number}"
                    if name not in self.now.pods:
                        manifest = mount_pods.manifest(mount, number, owner[0])
                        manifest["metadata"] |= {"uid": self.uid(), "creationTimestamp": at(self.seconds)}
                        self.put(name, manifest | {"status": {"phase": "Pending"}})

                yield from (create_attachment, create_pod)
            case DeletePod(pod, grace):
                yield lambda: self._delete(pod, grace)
            case DeleteAttachment(name):
                yield lambda: self.put(name, None, 1) if name in self.now.attachments else None
            case SetStatus(name, status):

                def set_status() -> None:
                    if name in self.now.attachments:
                        self.put(name, self.now.attachments[name] | {"status": dict(status)}, 1)

                yield set_status

    def _delete(self, pod: Existing, grace: int | None) -> None:
        if pod.name not in self.now.pods:
            return
        current = existing(self.now.pods[pod.name])
        assert current
        if grace is not None:
            self.killed.add(current.uid)
        if current.phase is Phase.FAILED:
            self.put(pod.name, None)
        else:
            self.end(pod.name)


class SharedVolumes(RuleBasedStateMachine):
    """The orders of events, and what is promised."""

    users = Bundle("users")

    @initialize(upgrade=st.sampled_from(["OnIdle", "Replace"]), idle=st.sampled_from([0, 100]))
    def begin(self, upgrade: str, idle: int) -> None:
        self.model = Model(upgrade, idle)
        self.number = 0

    # What users do

    @rule(target=users, node=st.sampled_from(["n1", "n2"]), group=st.sampled_from(GROUPS))
    def come(self, node: str, group: int | None) -> str:
        """A pod is scheduled."""
        self.number += 1
        name = f"app-{self.number}"
        context = {} if group is None else {"securityContext": {"fsGroup": group}}
        self.model.put(name, user(name, self.model.seconds, node, "Pending", **context))
        return name

    @rule(name=users)
    def leave(self, name: str) -> None:
        if name in self.model.now.pods:
            self.model.end(name)

    @rule(name=consumes(users))
    def go(self, name: str) -> None:
        """Without a grace period, as if the node was lost."""
        if pod := self.model.now.pods.get(name):
            self.model.detach(pod["metadata"]["uid"])
            self.model.put(name, None)

    @rule(name=users)
    def finish(self, name: str) -> None:
        if (pod := self.model.now.pods.get(name)) and pod["status"]["phase"] == "Running":
            self.model.detach(pod["metadata"]["uid"])
            self.model.change(name, phase="Succeeded")

    @rule(name=users)
    def start(self, name: str) -> None:
        """kubelet publishes the volume."""
        pod = self.model.now.pods.get(name)
        if pod and pod["status"]["phase"] == "Pending":
            self.model.attach(pod)
            if pod["metadata"]["uid"] in self.model.borrowed:
                self.model.change(name, phase="Running")

    # What happens to mount pods

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        if pending := [each for each in self.model.mounts() if each.phase is Phase.PENDING]:
            self.model.serve(data.draw(st.sampled_from(pending)))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if live := [each for each in self.model.mounts() if each.is_live]:
            mount = data.draw(st.sampled_from(live))
            self.model.lose(mount)
            self.model.change(mount.name, phase="Failed", reason="Evicted", conditions=[])

    @rule()
    def work(self) -> None:
        self.model.work()

    @rule(seconds=st.sampled_from([1, 5, 60]))
    def wait(self, seconds: int) -> None:
        self.model.seconds += seconds

    @rule()
    def edit(self) -> None:
        self.model.edit()

    @rule(data=st.data())
    def somebody_deletes(self, data: st.DataObject) -> None:
        """An administrator, or the API on behalf of a drain."""
        if live := [each for each in self.model.mounts() if each.is_live]:
            self.model.end(data.draw(st.sampled_from(live)).name)

    @rule(data=st.data())
    def somebody_deletes_an_attachment(self, data: st.DataObject) -> None:
        if names := sorted(self.model.now.attachments):
            self.model.put(data.draw(st.sampled_from(names)), None, 1)

    # What controllers do

    @rule(which=st.integers(0, 1), kind=st.integers(0, 2), number=st.sampled_from([1, 3, 1000]))
    def hear(self, which: int, kind: int, number: int) -> None:
        controller = self.model.controllers[which]
        controller.seen[kind] = min(controller.seen[kind] + number, len(self.model.histories[kind]) - 1)

    @rule(which=st.integers(0, 1))
    def look(self, which: int) -> None:
        if not self.model.controllers[which].requests:
            self.model.look(self.model.controllers[which])

    @rule(which=st.integers(0, 1), number=st.sampled_from([1, 1, 100]))
    def act(self, which: int, number: int) -> None:
        for _ in range(number):
            if requests := self.model.controllers[which].requests:
                requests.pop(0)()

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        """The next one lists all."""
        controller = self.model.controllers[which]
        controller.requests = []
        controller.seen = [len(history) - 1 for history in self.model.histories]

    # What is promised

    @invariant()
    def nobody_s_pod_is_gone(self) -> None:
        """A served user's pod exists, if only because it waits for it."""
        mounts = {each.uid for each in self.model.mounts()}
        assert set(self.model.borrowed.values()) <= mounts

    @rule()
    def settle(self) -> None:
        """When everybody has seen everything, each user is served, by one pod for each key and template."""
        self.model_settles()
        model = self.model
        for pod in model.users():
            if pod["status"]["phase"] in ("Pending", "Running"):
                assert pod["metadata"]["uid"] in model.borrowed
        live = [(each.base, model.key_of(each)) for each in model.mounts() if each.is_live]
        assert len(set(live)) == len(live)
        if model.upgrade == "Replace":
            assert len({key for _, key in live}) == len(live)
        assert {each.base for each in model.mounts() if each.is_live} <= model.now.attachments.keys()

    def model_settles(self) -> None:
        model = self.model
        for _ in range(ROUNDS):
            steps: list[Step] = []
            model.work()
            for controller in model.controllers:
                while controller.requests:
                    controller.requests.pop(0)()
                controller.seen = [len(history) - 1 for history in model.histories]
                steps += model.look(controller)
            model.work()
            model.seconds += 30
            if not steps and not any(each.phase is Phase.FAILED for each in model.mounts()):
                return
        raise AssertionError(f"there is still something to do: {steps}")

    def teardown(self) -> None:
        """Nothing is left when all users are gone."""
        if not hasattr(self, "model"):
            return
        for pod in list(self.model.users()):
            self.model.end(pod["metadata"]["name"])
        self.model_settles()
        self.model.seconds += 200
        self.model_settles()
        assert not self.model.now.pods
        assert not self.model.now.attachments


TestSharedVolumes = SharedVolumes.TestCase
TestSharedVolumes.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
