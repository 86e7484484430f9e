"""Two controllers and a real control plane: admissions by the thousand, while certificates are renewed, and who leads.

The nodes exist in the API server only, and nobody runs their pods: that these work is for other tests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import time
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import pytest
import yaml

from fusermount3_controller import election
from fusermount3_controller.mount_pods import ATTACHMENTS
from fusermount3_controller.serving_certificates import AUTHORITIES, CERTIFICATE
from tests.callers.conftest import or_not_run
from tests.cluster import binaries, configuration
from tests.cluster.api import Api
from tests.cluster.bare_controllers import MOUNTS, NAME, PROGRAM, Controllers, exposition
from tests.cluster.node import ClusterNode
from tests.cluster.shared_volumes import items, name_of, wait_until
from tests.cluster.test_mount_pods_in_a_cluster import TEAM, storage, template, user
from tests.lab.pace import SLOWNESS
from tests.unit.controller.samples import inline
from tests.unit.controller.samples import pod as made_pod
from tests.unit.controller.samples import template as sidecar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.cluster.long.conftest import Figure
    from tests.kubernetes.objects import Object

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SIDECAR, SHARED = "sidecar", "s3"
ADMISSIONS, RATE = 10_000, 50.0
"""Pods that ask for a sidecar, and how many of them in a second."""
WITHIN = 0.02
"""Seconds in which the webhook answers 99 of 100 of them, on a machine that does nothing else."""
BUSY = 10
"""How much longer it may take on one that does."""
UNRELATED = 300
MORE = 0.05
"""Seconds by which the creation of a pod without our volumes may take longer for the webhooks that nobody answers."""
PATIENCE = 120.0

#: So that certificates live for minutes in place of months: four are made while one authority is replaced by the next.
#: An authority must last until its successor signs: 2/3 of its life, its settling time, and a look at each of the two.
SHORT_LIVES = f"""
from datetime import timedelta
from fusermount3_controller import serving_certificates
serving_certificates._SKEW = timedelta()
serving_certificates.SETTLE = timedelta(seconds=25)
serving_certificates.CERTIFICATE_LIFE = timedelta(seconds=75)
serving_certificates.AUTHORITY_LIFE = timedelta(seconds=180)
{PROGRAM}
"""

_PODS = f"/api/v1/namespaces/{TEAM}/pods?dryRun=All"
_SECRET = f"/api/v1/namespaces/{NAME}/secrets/{NAME}-tls"
_CONFIGURATIONS = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
_CONFIGURATIONS += ",validatingadmissionpolicies,validatingadmissionpolicybindings"


@pytest.fixture(scope="module")
def controllers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    """Controllers that do not run yet, and a node that exists in their API server only."""
    with or_not_run():
        binaries.kubernetes()
    directory = tmp_path_factory.mktemp("controller")
    with ClusterNode(directory / "node", machine=configuration.SIMULATED) as node:
        controllers = Controllers(node, directory)
        controllers.install([template(SHARED), sidecar(name=SIDECAR)])
        node.kubectl("create", "namespace", TEAM)
        simulated: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": configuration.NAME}}
        node.kubectl("create", "--filename=-", input=yaml.safe_dump_all([simulated, *storage(SHARED)]))
        yield controllers


def test_who_does_not_ask_hardly_waits_for_webhooks_that_nobody_answers(
    controllers: Controllers, figure: Figure
) -> None:
    """Neither controller runs."""
    node = controllers.node

    def seconds() -> float:
        return controllers.node.in_network(lambda: asyncio.run(_created(node)))

    with_webhooks = seconds()
    theirs = json.loads(node.kubectl("get", _CONFIGURATIONS, "--output=json").stdout)["items"]
    assert [name_of(each) for each in theirs] == len(theirs) * [NAME]
    for each in theirs:
        each["metadata"] = {name: each["metadata"][name] for name in ("name", "labels")}
    node.kubectl("delete", _CONFIGURATIONS, NAME)
    try:
        without = seconds()
    finally:
        node.kubectl("create", "--filename=-", input=yaml.safe_dump_all(theirs))
    figure("milliseconds to create a pod, without the webhooks", round(1000 * without, 1))
    figure("with them", round(1000 * with_webhooks, 1))
    assert with_webhooks < without + SLOWNESS * MORE


async def _created(node: ClusterNode) -> float:
    """Return the seconds that the creation of a pod takes, as the median of many."""
    taken = []
    async with Api(node.root) as api:
        for _ in range(UNRELATED):
            begin = time.monotonic()
            answer = await api.ask("POST", _PODS, made_pod({"name": "data", "emptyDir": {}}))
            taken.append(time.monotonic() - begin)
            assert answer.good, answer
    return median(taken)


# Who leads


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_controller_that_leads_ends_and_the_other_one_makes_mount_pods(
    controllers: Controllers, figure: Figure, how: signal.Signals
) -> None:
    node = controllers.node
    with controllers.running():
        leader = wait_until(lambda: controllers.node.in_network(_leader), controllers.said, PATIENCE)
        os.kill(controllers.pids[leader], how)
        begin = time.monotonic()
        uses = user("waits", SHARED)
        uses["spec"]["nodeName"] = configuration.NAME
        node.kubectl("create", "--filename=-", input=yaml.safe_dump(uses))
        wait_until(lambda: _mount_pods(node) or None, controllers.said, PATIENCE)
        seconds = time.monotonic() - begin
        figure(f"seconds from {how.name} to the mount pod", round(seconds, 1))
        node.kubectl("delete", "pod", "waits", f"--namespace={TEAM}", "--force", "--grace-period=0")
        wait_until(lambda: not (_mount_pods(node) or items(node, ATTACHMENTS)) or None, controllers.said, PATIENCE)
        # Who was told to end has given up the Lease: nobody has waited until it had run out.
        assert how is signal.SIGKILL or seconds < SLOWNESS * election.DURATION


def _leader() -> int | None:
    """Return the number of the controller that leads."""
    leads = [number for number in range(2) if "\nfusermount3_controller_leader 1.0" in exposition(number)]
    return leads[0] if leads else None


def _mount_pods(node: ClusterNode) -> list[Object]:
    return items(node, "pods", f"--namespace={MOUNTS}")


# Certificates


class Admitted(NamedTuple):
    """What became of the pods: how many were `asked` for, and `refused`, with the first answers to these.

    `answered`: of both controllers, how many answers took at most so many seconds. `secrets`: the Secret's data, each
    time that it was looked at.
    """

    asked: int
    refused: int
    why: Sequence[str]
    answered: Counter[float]
    secrets: Sequence[dict[str, str]]

    def quantile(self, part: float) -> float:
        """Return the seconds in which this part of the answers was given, as far as the metrics tell."""
        return min(limit for limit, number in self.answered.items() if number >= part * self.answered[float("inf")])


def test_no_pod_is_refused_while_certificates_and_their_authority_are_replaced(
    controllers: Controllers, figure: Figure
) -> None:
    # Those that there may be are made for months.
    words = ["patch", "secret", f"{NAME}-tls", f"--namespace={NAME}", "--type=merge"]
    controllers.node.kubectl(*words, '--patch={"data": null}')
    with controllers.running(SHORT_LIVES):
        found = controllers.node.in_network(lambda: asyncio.run(_admitted(controllers.node)))
    certificates = {each[CERTIFICATE] for each in found.secrets}
    figure("admissions", found.asked)
    figure("refused", found.refused)
    figure("certificates meanwhile", len(certificates))
    figure("seconds of 50 and 99 % of the webhook's answers, at most", f"{found.quantile(0.5)}, {found.quantile(0.99)}")
    assert not found.refused, "\n".join([*found.why, controllers.said()])
    assert len(certificates) > 2
    assert found.quantile(0.99) <= SLOWNESS * BUSY * WITHIN


async def _admitted(node: ClusterNode) -> Admitted:
    """Have pods admitted at a steady rate, until there were enough of them and the authority has been replaced."""
    refused: list[str] = []
    secrets: list[dict[str, str]] = []
    tasks: list[asyncio.Task[None]] = []
    async with Api(node.root) as api:
        asking = made_pod(inline(template=SIDECAR))

        async def admission() -> None:
            answer = await api.ask("POST", _PODS, asking)
            if not (answer.good and answer.body["spec"].get("initContainers")):
                refused.append(str(answer))

        async def look() -> None:
            secrets.append((await api.ask("GET", _SECRET)).body["data"])

        before, begin = await asyncio.to_thread(_answered), time.monotonic()
        while len(tasks) < ADMISSIONS or not _is_replaced(secrets):
            assert time.monotonic() < begin + SLOWNESS * (ADMISSIONS / RATE + PATIENCE), secrets
            await asyncio.sleep(begin + len(tasks) / RATE - time.monotonic())
            tasks.append(asyncio.create_task(admission()))
            if len(tasks) % RATE == 0:
                await look()
        await asyncio.gather(*tasks)
        answered = await asyncio.to_thread(_answered)
    return Admitted(len(tasks), len(refused), refused[:3], answered - before, secrets)


def _is_replaced(secrets: Sequence[dict[str, str]]) -> bool:
    """Return whether an authority was trusted beside the one before it, and is the only one then."""
    pems = [base64.b64decode(each[AUTHORITIES]) for each in secrets]
    return any(one.endswith(other) and one != other for one, other in pairwise(pems))


def _answered() -> Counter[float]:
    """Return how many admissions both controllers have answered in so many seconds at most."""
    pattern = r'^fusermount3_controller_admission_seconds_bucket{le="(\S+)"} (\S+)$'
    found: Counter[float] = Counter()
    for number in range(2):
        found += Counter({float(le): int(float(n)) for le, n in re.findall(pattern, exposition(number), re.MULTILINE)})
    return found
