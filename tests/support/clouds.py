"""Google's and Microsoft's hosts, played over TLS: control planes here, objects by an emulator.

It is the proxy of `amazon`, with other names in its certificate: the clients under test talk to the
real host names, and the server counts the bytes of bodies that each host was sent.
"""

import copy
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.amazon import Amazon, Fault, Seen, _Handler

GOOGLE = "storage.europe-west3.rep.googleapis.com"
ELSEWHERE = "storage.us-east1.rep.googleapis.com"
PROJECT = "471100000000"
BUCKET = "ckpt"
ACCOUNT = "tieredaccount"
AZURE = f"{ACCOUNT}.blob.core.windows.net"
ARM = "management.azure.com"
LOGIN = "login.microsoftonline.com"
SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
OWNER = f"{SUBSCRIPTION}/training"
TENANT = "55555555-6666-7777-8888-999999999999"
_HOSTS = (GOOGLE, ELSEWHERE, "storage.googleapis.com", AZURE, f"{ACCOUNT}-secondary.x", ARM, LOGIN)

LAYOUT = {"location": "EUROPE-WEST3", "locationType": "region"}
BUCKET_SAYS = {
    "location": "EUROPE-WEST3",
    "locationType": "region",
    "projectNumber": PROJECT,
    "iamConfiguration": {
        "publicAccessPrevention": "enforced",
        "uniformBucketLevelAccess": {"enabled": True},
    },
}


def account_id(name: str = ACCOUNT, group: str = "training") -> str:
    """Return the id of a storage account, spelled as Azure does."""
    return (
        f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{group}/providers/Microsoft.Storage"
        f"/storageAccounts/{name}"
    )


def account(name: str = ACCOUNT, location: str = "germanywestcentral") -> dict[str, Any]:
    """Return what Azure says of an account that is as it should be."""
    return {
        "id": account_id(name),
        "name": name,
        "location": location,
        "sku": {"name": "Standard_ZRS"},
        "properties": {
            "primaryLocation": location,
            "allowBlobPublicAccess": False,
            "minimumTlsVersion": "TLS1_2",
            "supportsHttpsTrafficOnly": True,
            "encryption": {"keySource": "Microsoft.Storage"},
        },
    }


def replicas(*targets: str, source: str = ACCOUNT, container: str = BUCKET) -> dict[str, Any]:
    """Return object replication policies of an account."""
    rules = [{"sourceContainer": container, "destinationContainer": "copy"}]
    return {
        "value": [
            {"properties": {"sourceAccount": source, "destinationAccount": target, "rules": rules}}
            for target in targets
        ]
    }


class Clouds(Amazon):
    """Every host that is asked, on one port.

    Args:
        directory: For its certificate.
        emulator: Host and port of what keeps the objects.
    """

    def __init__(self, directory: Path, emulator: str = "") -> None:
        super().__init__(directory)
        self.emulator = emulator
        self.forget()

    def forget(self) -> None:
        """Be as it should be again."""
        self.faults.clear()
        self.log.clear()
        self.body_bytes.clear()
        self.on_put = None
        self.says: dict[str, Any] = {
            "layout": copy.deepcopy(LAYOUT),
            "bucket": copy.deepcopy(BUCKET_SAYS),
            "iam": {"bindings": [{"role": "r", "members": ["user:alice@example.org"]}]},
            "replicas": {"value": []},
        }
        """What each question is answered with."""
        self.accounts = {ACCOUNT: account()}
        self.redirect_to = ""
        """A host that requests about objects are sent on to."""
        self.upload_host = ""
        """A host that uploads are said to go to, other than that which was asked."""

    def environment(self, region: str = "") -> dict[str, str]:
        """Return the environment of a process that talks to this server."""
        proxy = f"http://127.0.0.1:{self._server.server_port}"
        return {"HTTPS_PROXY": proxy, "REQUESTS_CA_BUNDLE": str(self.ca)}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        return _CloudHandler

    def _names(self) -> str:
        return ",".join(f"DNS:{host}" for host in _HOSTS)


def google_options() -> dict[str, Any]:
    """Return options for `gs=` of somebody who is logged in."""
    return {"token": "somebody"}


def azure_options(key: str = "a2V5") -> dict[str, Any]:
    """Return options for `az=` of somebody who has a key, and may ask Resource Manager."""
    return {
        "account_name": ACCOUNT,
        "account_key": key,
        "client_id": "c",
        "client_secret": "s",
        "tenant_id": TENANT,
    }


class _CloudHandler(_Handler):
    """Answers for all hosts."""

    amazon: Clouds

    def do(self) -> None:
        host = self.headers["Host"].partition(":")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.amazon.body_bytes[host] += len(body)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.amazon.log.append(Seen(host, self.command, self.path, headers))
        path = urlsplit(self.path).path
        if host == LOGIN:
            return self._login(path)
        if host == ARM:
            return self._resource(path)
        question = {
            f"/storage/v1/b/{BUCKET}/storageLayout": "layout",
            f"/storage/v1/b/{BUCKET}/iam": "iam",
            f"/storage/v1/b/{BUCKET}": "bucket",
        }.get(path)
        if question is not None:
            return self._say(question, self.amazon.says[question])
        return self._object_of(host, path, body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do  # noqa: N815 - http.server's names

    def _login(self, path: str) -> None:
        if "token" in self.amazon.faults:
            return self._fault(self.amazon.faults["token"])
        base = f"https://{LOGIN}/{TENANT}"
        if path.endswith("/token"):
            return self._json({"token_type": "Bearer", "expires_in": 3600, "access_token": "t"})
        return self._json(
            {
                "token_endpoint": f"{base}/oauth2/v2.0/token",
                "authorization_endpoint": f"{base}/oauth2/v2.0/authorize",
                "issuer": f"{base}/v2.0",
                "tenant_discovery_endpoint": f"{base}/v2.0/.well-known/openid-configuration",
                "metadata": [],
            }
        )

    def _resource(self, path: str) -> None:
        if self.headers.get("Authorization") != "Bearer t":
            return self._json({"error": {"code": "InvalidAuthenticationToken"}}, 401)
        path, _, rest = path.partition("/objectReplicationPolicies")
        del rest
        name = path.rpartition("/")[2]
        if "objectReplicationPolicies" in self.path:
            mine = self.amazon.says["replicas"] if name == ACCOUNT else {"value": []}
            return self._say("replicas", mine)
        found = self.amazon.accounts.get(name)
        if found is None or found["id"].lower() != path.lower():
            return self._json({"error": {"code": "ResourceNotFound"}}, 404)
        return self._say("account" if name == ACCOUNT else name, found)

    def _say(self, question: str, said: Any) -> None:
        if question in self.amazon.faults:
            return self._fault(self.amazon.faults[question])
        return self._json(said)

    def _json(self, said: Any, status: int = 200) -> None:
        self._reply(status, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _object_of(self, host: str, path: str, body: bytes) -> None:
        """Pass a request about an object on, or answer it with a redirect."""
        if self.amazon.redirect_to:
            location = f"https://{self.amazon.redirect_to}{self.path}"
            return self._reply(307, b"", {"Location": location})
        if self.amazon.on_put is not None and body:
            names = parse_qs(urlsplit(self.path).query).get("name", [""])[0]
            self.amazon.on_put(path + names + body[:2000].decode("latin-1"))
        self._host = host
        return self._pass_on(self.amazon.emulator, body)

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        given = dict(headers or {})
        location = urlsplit(given.get("Location", ""))
        if location.scheme == "http":  # the emulator does not know that it is behind TLS
            host = self.amazon.upload_host or self._host
            given["Location"] = location._replace(scheme="https", netloc=host).geturl()
        super()._reply(status, body, given)


DENIED = Fault(403, body=json.dumps({"error": {"code": "AuthorizationFailed", "message": "no"}}))
"""How both say that a permission is missing."""
DOWN = Fault(503, body="{}")
SILENT = Fault(silence_s=2.5)
GARBLED = Fault(200, body="<html>")
