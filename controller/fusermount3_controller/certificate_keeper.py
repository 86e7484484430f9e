"""Keeps the webhook's certificates: in a Secret, in what the server presents, and in what the API server trusts.

Replicas do the same, each by itself. Whatever is written names the version that was read (optimistic locking), so the
second of two fails, reads what the first has written, and uses that.
"""

import asyncio
import base64
import datetime
import logging
import os
import ssl
from typing import NamedTuple, NoReturn

from lightkube import ApiError, AsyncClient
from lightkube.resources.admissionregistration_v1 import (
    MutatingWebhookConfiguration,
    ValidatingWebhookConfiguration,
)
from lightkube.resources.core_v1 import Secret
from lightkube.types import PatchType

from fusermount3_controller.api_errors import CONFLICT
from fusermount3_controller.serving_certificates import Certificates, due

#: Seconds between looks at the Secret and the configuration: so long is what somebody else changed there unnoticed.
INTERVAL = 10.0
#: Seconds until the next try after a failure, such as a configuration that is only about to be created.
_PAUSE = 2.0

_Configuration = MutatingWebhookConfiguration | ValidatingWebhookConfiguration

_log = logging.getLogger(__name__)


class Names(NamedTuple):
    """Where the certificates are: the Secret, the configurations that trust them, and the host that they name.

    `configuration`: of both, the MutatingWebhookConfiguration and the ValidatingWebhookConfiguration.
    """

    namespace: str
    secret: str
    configuration: str
    host: str


class CertificateKeeper:
    """Keeps the certificates; `context` is for the server, and changes when they do."""

    def __init__(self, client: AsyncClient, names: Names) -> None:
        self._client = client
        self._names = names
        self._loaded: Certificates | None = None
        self._is_trusted = False
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def is_trusted(self) -> bool:
        """Return whether the server presents a certificate, and the API server was told to trust it."""
        return self._is_trusted

    def expiry(self) -> float:
        """Return when the serving certificate expires, in seconds since the epoch; 0 without one."""
        return self._loaded.expiry().timestamp() if self._loaded else 0.0

    async def keep(self, interval: float = INTERVAL) -> NoReturn:
        """Do it all again and again."""
        while True:
            pause = interval
            try:
                await self.look(datetime.datetime.now(datetime.UTC))
            except Exception as error:
                # Whatever it was: the certificate that is forgotten expires.
                pause = min(_PAUSE, interval)
                _log.warning("can't keep the certificates: %r; trying again in %.0f s", error, pause)
            await asyncio.sleep(pause)

    async def look(self, now: datetime.datetime) -> None:
        """Renew what is due, load what is new, and have the API server trust it."""
        current = await self._renewed(now)
        if current != self._loaded:
            _load(self.context, current)
            self._loaded = current
            _log.info("the certificate is valid until %s", current.expiry().isoformat())
        for configuration in (MutatingWebhookConfiguration, ValidatingWebhookConfiguration):
            await self._publish(configuration, current.authorities)
        self._is_trusted = True

    async def _renewed(self, now: datetime.datetime) -> Certificates:
        """Return what is in the Secret, after writing what is due."""
        while True:
            secret = await self._client.get(Secret, self._names.secret, namespace=self._names.namespace)
            data = {name: base64.b64decode(text) for name, text in (secret.data or {}).items()}
            current = Certificates.of(data)
            if (new := due(current, self._names.host, now)) is None:
                assert current is not None
                return current
            assert secret.metadata is not None
            patch = {
                "metadata": {"resourceVersion": secret.metadata.resourceVersion},
                "data": {name: base64.b64encode(text).decode() for name, text in new.data().items()},
            }
            try:
                await self._client.patch(
                    Secret, self._names.secret, patch, namespace=self._names.namespace, patch_type=PatchType.MERGE
                )
            except ApiError as error:
                if error.status.code != CONFLICT:
                    raise
                continue  # another replica was faster: what it has written may be all that was due
            _log.info("the certificates have been renewed")

    async def _publish(self, resource: type[_Configuration], authorities: bytes) -> None:
        """Have the API server trust these authorities."""
        bundle = base64.b64encode(authorities).decode()
        while True:
            configuration: _Configuration = await self._client.get(resource, self._names.configuration)
            webhooks = configuration.webhooks or []
            if all(each.clientConfig.caBundle == bundle for each in webhooks):
                return
            assert configuration.metadata is not None
            patch = {
                "metadata": {"resourceVersion": configuration.metadata.resourceVersion},
                "webhooks": [_trusting(each.name, bundle) for each in webhooks],
            }
            try:
                await self._client.patch(resource, self._names.configuration, patch)
            except ApiError as error:
                if error.status.code != CONFLICT:
                    raise  # else another one was faster, and may have written something else


def _trusting(name: str, bundle: str) -> dict[str, object]:
    """Return the part of a strategic merge patch that changes the bundle of this webhook, and no other field."""
    return {"name": name, "clientConfig": {"caBundle": bundle}}


def _load(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Have new connections see these; the key is never in a file, for OpenSSL reads it from memory of this process."""
    descriptor = os.memfd_create("tls")
    with os.fdopen(descriptor, "wb") as file:
        file.write(certificates.certificate + certificates.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
