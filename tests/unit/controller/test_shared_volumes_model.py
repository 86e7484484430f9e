"""Two controllers and a cluster that does what it likes: pods come, end and fail, and each controller sees it late.

The cluster is a model of the API server, scheduler, kubelet, garbage collector and node plugin. A controller sees a
past state of pods, of attachments and of the template, each as old as it may be; it makes one request at a time, and
may crash between any two. A node may die, of whose pods nobody says anything then but that they are to end, until it is
gone. hypothesis looks for an order of events after which one of the promises is broken.
"""

from __future__ import annotations

import copy
import datetime
from typing import TYPE_CHECKING, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fusermount3_controller import mount_pods
from fusermount3_controller.mount_pod_steps import CreatePod, DeleteAttachment, DeletePod, SetStatus, steps
from fusermount3_controller.mount_pods import Phase, existing, moment
from fusermount3_controller.rendering import node_of
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
WHICH, INDEX, REQUESTS = st.integers(0, 1), st.integers(0, 3), st.sampled_from([0, 1, 2, 3, 100, 100, 100])
#: How many of the newest states of each history a controller has not heard of.
BEHIND = st.one_of(st.just((0, 0, 0)), st.tuples(*3 * [st.sampled_from([0, 0, 1, 1, 2, 3, 1000])]))
#: Mostly the same place, so that something happens there.
PLACES = (*4 * [("n1", None)], ("n2", None), ("n1", 1000))


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
        #: Nodes whose kubelet does nothing any more.
        self.dead: set[str] = set()
        self.controllers = (Controller(), Controller())

    # The API server

    @property
    def now(self) -> Views:
        return Views(self.histories[0][-1], self.histories[1][-1], self.histories[2][-1])

    def put(self, name: str, manifest: Manifest | None, kind: int = 0) -> None:
        """Write a pod or, of kind 1, an attachment; None: remove it."""
        history = self.histories[0] if kind == 0 else self.histories[1]
        state = dict(history[-1])
        if manifest is None:
            state.pop(name)
        else:
            state[name] = copy.deepcopy(manifest)
        history.append(state)

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

    def take_template(self) -> None:
        """Delete the template, which leaves all pods as they are."""
        self.histories[2].append(self._known()._replace(templates={}))

    def bring_template(self) -> None:
        """Have a template again, if it was deleted."""
        if not self.now.cluster.templates:
            self.edit()

    def _known(self) -> Known:
        """Every other template has a namespace of its own for its mount pods."""
        result = known(self.generation, upgrade=self.upgrade, idleSeconds=self.idle)
        namespace = "" if self.generation % 2 else "fuse-devices"
        return result._replace(templates={"s3": result.templates["s3"]._replace(namespace=namespace)})

    def uid(self) -> str:
        self.uids += 1
        return f"uid {self.uids}"

    def users(self) -> Iterator[Manifest]:
        yield from (pod for pod in self.now.pods.values() if not existing(pod))

    def mounts(self) -> Iterator[Existing]:
        yield from filter(None, map(existing, self.now.pods.values()))

    def key_of(self, mount: Existing) -> tuple[str, str]:
        pod = self.now.pods[mount.name]
        return node_of(pod["spec"]), pod["spec"]["volumes"][-1]["csi"]["volumeAttributes"]["share"]

    def place_of(self, pod: Manifest) -> str:
        """Return the node of a user or a mount pod."""
        return str(pod["spec"].get("nodeName") or node_of(pod["spec"]))

    # kubelet and the node plugin

    def attach(self, pod: Manifest) -> None:
        """Give a user what is served, if anything is; of two, what was made of the newer template."""
        (place,) = wanted([pod], self._known()).mounts
        served = [each for each in self.mounts() if self._serves(each) and self.key_of(each) == place]
        if served:
            newest = max(served, key=lambda each: (moment(each.created), each.number))
            self.borrowed[pod["metadata"]["uid"]] = newest.uid

    def _serves(self, mount: Existing) -> bool:
        """Return whether a FUSE program serves: also while the pod waits for its users."""
        conditions = self.now.pods[mount.name]["status"].get("conditions") or []
        is_over = mount.phase is Phase.FAILED
        return not is_over and any(each["type"] == "Ready" for each in conditions)

    def start(self, name: str) -> None:
        """Publish the volume of a user, which can begin then."""
        pod = self.now.pods[name]
        self.attach(pod)
        if pod["metadata"]["uid"] in self.borrowed:
            self.change(name, phase="Running")

    def detach(self, uid: str) -> None:
        self.borrowed.pop(uid, None)

    def serve(self, mount: Existing) -> None:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": at(self.seconds)}
        self.change(mount.name, phase="Running", conditions=[ready])

    def double(self, mount: Existing) -> None:
        """Make another pod of the same MountPodAttachment, with the least number that is free."""
        number = next(number for number in range(10) if f"{mount.base}-{number}" not in self.now.pods)
        manifest = copy.deepcopy(self.now.pods[mount.name]) | {"status": {"phase": "Pending"}}
        manifest["metadata"] |= {
            "name": f"{mount.base}-{number}",
            "uid": self.uid(),
            "creationTimestamp": at(self.seconds),
        }
        self.put(manifest["metadata"]["name"], manifest)

    def lose(self, mount: Existing) -> None:
        """Its users have nothing any more, until another pod serves them."""
        self.borrowed = {user: source for user, source in self.borrowed.items() if source != mount.uid}

    def work(self) -> None:
        """Do all that kubelet, the node plugin and the garbage collector have to do."""
        for pod in list(self.users()):
            if pod["metadata"].get("deletionTimestamp") and self.place_of(pod) not in self.dead:
                self.detach(pod["metadata"]["uid"])
                self.put(pod["metadata"]["name"], None)
        owners = {each["metadata"]["uid"] for each in self.now.attachments.values()}
        for mount in list(self.mounts()):
            if self.now.pods[mount.name]["metadata"]["ownerReferences"][0]["uid"] not in owners:
                self.end(mount.name)
        for mount in list(self.mounts()):
            if node_of(self.now.pods[mount.name]["spec"]) in self.dead:
                continue
            if mount.phase is Phase.PENDING:
                self.serve(mount)
            elif mount.phase is Phase.ENDING and (mount.uid not in self.borrowed.values() or mount.uid in self.killed):
                self.lose(mount)
                self.put(mount.name, None)
        for pod in list(self.users()):
            if self.waits(pod) and pod["metadata"]["uid"] not in self.borrowed:
                self.start(pod["metadata"]["name"])

    def waits(self, pod: Manifest) -> bool:
        """Return whether the user is to have a filesystem."""
        return pod["status"]["phase"] in ("Pending", "Running") and self.place_of(pod) not in self.dead

    def die(self, node: str) -> None:
        """The node does not answer any more, so its pods are told to end, and don't."""
        self.dead.add(node)
        for pod in list(self.now.pods.values()):
            if self.place_of(pod) == node:
                self.end(pod["metadata"]["name"])

    def go(self, node: str) -> None:
        """The node is removed, and its pods with it; another one may have its name then."""
        self.dead.discard(node)
        for pod in list(self.now.pods.values()):
            if self.place_of(pod) == node:
                self.detach(pod["metadata"]["uid"])
                self.put(pod["metadata"]["name"], None)

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
    """The orders of events, and what is promised.

    There are few rules, each for several events: of many, hypothesis would leave out most in each run.
    """

    @initialize(
        upgrade=st.sampled_from(["OnIdle", "Replace"]),
        idle=st.sampled_from([0, 100]),
        users=st.lists(st.sampled_from(PLACES), min_size=1, max_size=2),
        then=st.sampled_from(["begin", "", "edit", "edit", "wait and edit"]),
    )
    def begin(self, upgrade: str, idle: int, users: list[tuple[str, int | None]], then: str) -> None:
        """These are to be served, are, or were by the template as it was: most of what can go wrong begins there."""
        self.model = Model(upgrade, idle)
        self.number = 0
        for place in users:
            self.a_user_comes(place)
        if then == "begin":
            self.a_controller_looks(0, (0, 0, 0), 100)
            return
        self.model_settles()
        if then == "wait and edit":
            self.model.seconds += 60
        if then:
            self.model.edit()

    @rule(place=st.sampled_from(PLACES))
    def a_user_comes(self, place: tuple[str, int | None]) -> None:
        """A pod is scheduled."""
        node, group = place
        self.number += 1
        name = f"app-{self.number}"
        context = {} if group is None else {"securityContext": {"fsGroup": group}}
        self.model.put(name, user(name, self.model.seconds, node, "Pending", **context))

    @rule(event=st.sampled_from(["start", "start", "leave", "go", "finish"]), index=INDEX)
    def a_user(self, event: str, index: int) -> None:
        """A volume is published; a pod is told to end, is gone at once as with its node, or has done its work."""
        users = sorted(self.model.users(), key=lambda pod: str(pod["metadata"]["name"]))
        if not users:
            return
        metadata, status = (users[index % len(users)][name] for name in ("metadata", "status"))
        if self.model.place_of(users[index % len(users)]) in self.model.dead and event != "leave":
            return
        if event == "start" and status["phase"] == "Pending":
            self.model.start(metadata["name"])
        elif event == "leave":
            self.model.end(metadata["name"])
        elif event == "go":
            self.model.detach(metadata["uid"])
            self.model.put(metadata["name"], None)
        elif event == "finish" and status["phase"] == "Running":
            self.model.detach(metadata["uid"])
            self.model.change(metadata["name"], phase="Succeeded")

    @rule(event=st.sampled_from(["serve", "serve", "fail", "fail", "delete", "double"]), index=INDEX)
    def a_mount_pod(self, event: str, index: int) -> None:
        """It serves, is evicted, deleted by an administrator or a drain, or made again by who has not heard of it."""
        live = sorted((each for each in self.model.mounts() if each.is_live), key=lambda each: each.name)
        if not live:
            return
        mount = live[index % len(live)]
        if node_of(self.model.now.pods[mount.name]["spec"]) in self.model.dead and event != "delete":
            return
        if event == "serve" and mount.phase is Phase.PENDING:
            self.model.serve(mount)
        elif event == "fail":
            self.model.lose(mount)
            self.model.change(mount.name, phase="Failed", reason="Evicted", conditions=[])
        elif event == "delete":
            self.model.end(mount.name)
        elif event == "double":
            self.model.double(mount)

    @rule(
        event=st.sampled_from(["work", "work", "work", "wait", "wait", "edit", "forget", "take", "bring", "die", "go"]),
        seconds=st.sampled_from([1, 5, 60]),
        node=st.sampled_from(["n1", "n1", "n2"]),
    )
    def the_cluster(self, event: str, seconds: int, node: str) -> None:
        """All do their work, or time passes; somebody edits the template, deletes an attachment, or the template, which
        may come back; a node dies or goes.
        """
        if event == "work":
            self.model.work()
        elif event == "wait":
            self.model.seconds += seconds
        elif event == "edit":
            self.model.edit()
        elif event == "take":
            self.model.take_template()
        elif event == "bring":
            self.model.bring_template()
        elif event == "forget":
            for name in sorted(self.model.now.attachments)[:1]:
                self.model.put(name, None, 1)
        elif event == "die":
            self.model.die(node)
        elif event == "go":
            self.model.go(node)

    @rule(which=WHICH, behind=BEHIND, number=REQUESTS)
    def a_controller_looks(self, which: int, behind: tuple[int, int, int], number: int) -> None:
        """It hears of all but the newest states of each history, decides, and makes some of its requests."""
        controller = self.model.controllers[which]
        lengths = [len(history) - 1 for history in self.model.histories]
        controller.seen = [
            max(seen, length - less) for seen, length, less in zip(controller.seen, lengths, behind, strict=True)
        ]
        self.model.look(controller)
        self._act(controller, number)

    @rule(which=WHICH, number=REQUESTS)
    def a_controller_acts(self, which: int, number: int) -> None:
        self._act(self.model.controllers[which], number)

    @rule(which=WHICH)
    def a_controller_crashes(self, which: int) -> None:
        """The next one lists all."""
        controller = self.model.controllers[which]
        controller.requests = []
        controller.seen = [len(history) - 1 for history in self.model.histories]

    @staticmethod
    def _act(controller: Controller, number: int) -> None:
        for _ in range(number):
            if controller.requests:
                controller.requests.pop(0)()

    # What is promised

    @invariant()
    def nobody_s_pod_is_gone(self) -> None:
        """A served user's pod exists, if only because it waits for it."""
        mounts = {each.uid for each in self.model.mounts()}
        assert set(self.model.borrowed.values()) <= mounts

    @rule()
    def settle(self) -> None:
        """When everybody has seen everything, each user is served, by one pod for each key and template."""
        self.model.bring_template()
        self.model_settles()
        model = self.model
        for pod in model.users():
            if model.waits(pod):
                assert pod["metadata"]["uid"] in model.borrowed
        live = [(each.base, model.key_of(each)) for each in model.mounts() if each.is_live]
        assert len(set(live)) == len(live)
        if model.upgrade == "Replace":
            assert len({key for _, key in live}) == len(live)
        # Who is told to end before it began gets no mount pod, and stays on a node that is dead.
        ending = wanted([pod for pod in model.users() if pod["metadata"].get("deletionTimestamp")], model.now.cluster)
        without = {mount.name for mount in ending.mounts.values()}
        assert model.now.attachments.keys() <= {each.base for each in model.mounts()} | without

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
            decided = model.now
            model.work()
            model.seconds += 30
            if not steps and model.now == decided and not any(each.phase is Phase.FAILED for each in model.mounts()):
                return
        raise AssertionError(f"there is still something to do: {steps}")

    def teardown(self) -> None:
        """Nothing is left when all users are gone, whether or not there is a template."""
        if not hasattr(self, "model"):
            return
        for node in list(self.model.dead):
            self.model.go(node)
        for pod in list(self.model.users()):
            self.model.end(pod["metadata"]["name"])
        self.model_settles()
        self.model.seconds += 200
        self.model_settles()
        assert not self.model.now.pods
        assert not self.model.now.attachments


TestSharedVolumes = SharedVolumes.TestCase
TestSharedVolumes.settings = settings(
    max_examples=600, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
