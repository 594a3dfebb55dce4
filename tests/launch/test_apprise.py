"""Services by Apprise: bodies that real servers get from its own code, and what fails is said without a secret."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import ssl
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from resilio_hpc.core.errors import UsageError
from resilio_hpc.launch.notify.sender import deliver
from resilio_hpc.launch.rundir.notify_targets import check_targets, parse_target
from tests.support.launch.mail_server import MailServer
from tests.support.launch.webhook_server import Server

ALERT = {
    "v": 1, "event": "alert", "alert": "stalled", "severity": "critical", "run_dir": "/runs/large", "job": "7114",
    "text": "large: critical stalled: no step for 40 min 00 s <b>&", "do": "resilio diagnose /runs/large",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:apprise")


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(200)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# service: a URL of it, where its plug-in keeps the host, and the path to the text in the body that it posts
FIXED_HOSTS: dict[str, tuple[str, str, str, tuple[Any, ...]]] = {
    "Slack": ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/", "slack.NotifySlack", "webhook_url",
              ("attachments", 0, "text")),
    "DingTalk": ("dingtalk://abcdefgh12345678/", "dingtalk.NotifyDingTalk", "notify_url", ("text", "content")),
    "WeCom": ("wecombot://abcdefgh-1234-5678-9012-abcdefghijkl/", "wecombot.NotifyWeComBot", "notify_url",
              ("text", "content")),
}  # fmt: skip


@pytest.mark.parametrize("service", FIXED_HOSTS)
def test_a_chat_gets_the_body_that_it_wants(service: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apprise's plug-in makes the body and posts it; only the service's host is this machine's instead."""
    url, plugin, where, path = FIXED_HOSTS[service]
    module, _, name = plugin.partition(".")
    kind = getattr(importlib.import_module(f"apprise.plugins.{module}"), name)
    monkeypatch.setattr(kind, where, server.url)
    said = deliver(parse_target(url), ALERT, retry_after_s=0.0)
    assert server.received, said
    _, body = server.received[0]
    for step in path:
        body = body[step]
    text = str(body)
    assert "large: critical stalled" in text and "do: resilio diagnose /runs/large" in text


def test_teams_gets_a_card(server: Server, tmp_path: Path) -> None:
    """Its plug-in speaks TLS only, so the server does, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(self_signed(tmp_path))
    server.server.socket = context.wrap_socket(server.server.socket, server_side=True)
    url = f"workflows://{server.url.split('/')[2]}/WORKFLOWID/SIGNATURE/?verify=no"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing verifies it is wanted here
        assert deliver(parse_target(url), ALERT, retry_after_s=0.0) == ""
    card = json.dumps(server.received[0][1])
    assert "AdaptiveCard" in card and "large: critical stalled" in card


def self_signed(folder: Path) -> Path:
    """A key and its own certificate for this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now.replace(year=2099)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "server.pem"
    path.write_bytes(private + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def test_mail() -> None:
    server = MailServer()
    url = f"mailto://127.0.0.1:{server.port}?from=resilio@example.org&to=me@example.org&mode=insecure"
    assert deliver(parse_target(url), ALERT) == ""
    server.close()
    (mail,) = server.received
    assert mail["Subject"] == "resilio: alert" and "me@example.org" in mail["To"]
    body = mail.get_body(("plain", "html"))
    assert body is not None and "do: resilio diagnose /runs/large" in body.get_content()


def test_a_failure_says_no_secret(server: Server) -> None:
    refusing = Server(403)
    url = f"json://me:SECRET@{refusing.url.split('/')[2]}/SECRET"
    why = deliver(parse_target(url), ALERT, retry_after_s=0.0)
    refusing.close()
    assert why == "the service did not take it"


def test_a_url_that_apprise_does_not_know_is_refused_when_the_command_begins(tmp_path: Path) -> None:
    for url in ("ftp://h/SECRET", "slack://SECRET", "htps://h/SECRET"):
        with pytest.raises(UsageError, match=r"is not supported, or its URL") as refused:
            check_targets([parse_target(url)], tmp_path)
        assert "SECRET" not in str(refused.value)
    check_targets([parse_target("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/")], tmp_path)


def test_without_apprise_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "apprise" else found(name))
    with pytest.raises(UsageError, match=r"pip install 'resilio_hpc\[notify\]'"):
        check_targets([parse_target("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/")], tmp_path)
