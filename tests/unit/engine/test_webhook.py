"""Webhooks on the loopback interface: what is sent, and that no message contains the address."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gpunodes.engine import webhook
from gpunodes.errors import GpunodesError, WrongInput

from tests import forward_proxy
from tests.webhooks import receiver

SECRET = "T000-s3cret"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def failure(url: str) -> str:
    """The message of a notice that fails; it does not contain the secret."""
    with pytest.raises(GpunodesError) as caught:
        webhook.post(webhook.webhook(url), b"{}")
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(webhook.webhook(url))
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_a_post_of_json() -> None:
    with receiver() as (at, received):
        webhook.post(webhook.webhook(f"http://{at}/services/{SECRET}?a=b#c"), b'{"x": 1}')
    ((path, headers, body),) = received
    assert (path, body) == (f"/services/{SECRET}?a=b", b'{"x": 1}')
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers


def test_user_and_password_in_the_address_are_a_header() -> None:
    with receiver() as (at, received):
        webhook.post(webhook.webhook(f"http://ann:p%40ss@{at}/"), b"{}")
    assert received[0][1]["Authorization"] == "Basic " + base64.b64encode(b"ann:p@ss").decode()


@pytest.mark.parametrize("status", [400, 403, 404, 500])
def test_an_error_of_the_service(status: int) -> None:
    with receiver(lambda handler: handler.send_response(status, f"{SECRET}\x1b[2J")) as (at, _):
        assert f"127.0.0.1 failed: it responds with HTTP status {status}" in failure(f"http://{at}/{SECRET}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status: int) -> None:
    with receiver() as (other, received):

        def redirect(handler: Any) -> None:
            handler.send_response(status)
            handler.send_header("Location", f"http://{other}/{SECRET}")

        with receiver(redirect) as (at, _):
            assert f"status {status}" in failure(f"http://{at}/{SECRET}")
        assert received == []


def test_nothing_listens() -> None:
    with receiver() as (at, _):
        pass
    assert "Connection refused" in failure(f"http://{at}/{SECRET}")


def test_a_service_that_drips_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "DEADLINE_S", 1.0)
    ended = threading.Event()

    def drip(handler: Any) -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.2):
                handler.wfile.write(b"H")

    with receiver(drip) as (at, _):
        began = time.monotonic()
        assert "no response within 1 s" in failure(f"http://{at}/{SECRET}")
        assert time.monotonic() < began + 3
        ended.set()


def test_what_is_no_http() -> None:
    with receiver(lambda handler: handler.wfile.write(SECRET.encode() + b"\r\n\r\n")) as (at, _):
        assert "the response is not valid" in failure(f"http://{at}/{SECRET}")


def test_tls_is_verified(tmp_path: Any) -> None:
    with tls_receiver(tmp_path) as at:
        assert "its certificate is not valid" in failure(f"https://{at}/{SECRET}")


def test_a_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as (proxy, received):
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        webhook.post(webhook.webhook("http://hooks.invalid/x"), b"{}")
    assert received[0][0] == "http://hooks.invalid/x"


@pytest.mark.parametrize(("direct", "through"), [("", True), ("127.0.0.1", False)])
def test_a_proxy_of_the_environment_tunnels_and_sees_no_path(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, direct: str, *, through: bool
) -> None:
    """The certificate is still verified behind it; ``no_proxy`` leaves it out."""
    monkeypatch.setenv("no_proxy", direct)
    with forward_proxy.running() as proxy, tls_receiver(tmp_path) as at:
        monkeypatch.setenv("HTTPS_PROXY", proxy.address)
        assert "its certificate is not valid" in failure(f"https://{at}/{SECRET}")
    assert [(each.method, each.target) for each in proxy.records] == [("CONNECT", at)] * through


@pytest.mark.parametrize(
    "url",
    [
        "",
        SECRET,
        f"ftp://host/{SECRET}",
        f"file:///{SECRET}",
        f"https:///{SECRET}",
        f"https://[::1/{SECRET}",
        f"https://host:{SECRET}/",
        f"https://host/{SECRET}\r\nX: y",
        f"https://host/{SECRET} x",
        f"https://höst/{SECRET}",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(WrongInput) as caught:
        webhook.webhook(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@contextlib.contextmanager
def tls_receiver(folder: Any) -> Iterator[str]:
    """A TLS server with a certificate of no authority."""
    import datetime as dt
    import socket
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    certificate = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + dt.timedelta(1)
    )
    pem = folder / "pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            context.wrap_socket(client, server_side=True)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
