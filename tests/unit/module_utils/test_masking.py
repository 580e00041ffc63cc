"""Secrets are hidden in texts and objects, and everything else is shown."""

from __future__ import annotations

import base64
import json
import re
import time
from typing import Any

import pytest
from gpunodes.ansible.module_utils.masking import Mask, Secret
from gpunodes.ansible.module_utils.report import Difference, of_file, shown

HIDDEN = "hunter2hunter2"

TEXTS = {
    "containerd's registry": f'[plugins.registry.configs."r".auth]\n  username = "u"\n  password = "{HIDDEN}"\n',
    "an inline table": f'auth = {{ username = "u", password = "{HIDDEN}" }}\n',
    "a header of containerd": f'[host."https://r".header]\n  Authorization = ["Basic {HIDDEN}"]\n',
    "a header on several lines": f'  Authorization = [\n    "{HIDDEN}",\n  ]\nother = 1\n',
    "docker's config.json": json.dumps({"auths": {"r.io": {"auth": HIDDEN}}}),
    "the same, indented": json.dumps({"auths": {"r.io": {"auth": HIDDEN, "email": "x"}}}, indent=2),
    "an identity token": f"identitytoken: {HIDDEN}",
    "YAML over lines": f"a: 1\npassword: |\n  {HIDDEN}\nb: 2\n",
    "TOML over lines": f'password = """\n{HIDDEN}\n"""\n',
    "YAML over further lines": f"a: 1\nb:\n  password: x\n\n    {HIDDEN}\n  c: 1\n",
    "a quoted text over lines": f'password: "x\n{HIDDEN}"\n',
    "TOML that begins on the first line": f"password = '''x\n{HIDDEN}'''\n",
    "a line that a backslash continues": f"PASSWORD=x\\\n{HIDDEN}\n",
    "a list that begins on the first line": f'authorization = ["x",\n"{HIDDEN}"]\n',
    "an option of a mount": f"//srv/share /mnt cifs username=u,password={HIDDEN} 0 0\n",
    "a source of dnf": f"[r]\nbaseurl=https://u:{HIDDEN}@mirror/\nproxy_password={HIDDEN}\n",
    "a source of apt": f"URIs: https://u:{HIDDEN}@mirror/debian\n",
    "a URL with a token": f"https://{HIDDEN}@mirror/",
    "a proxy whose password has an @": f"the proxy http://builder:x@{HIDDEN}@proxy.example:3128 cannot be used",
    "a kubeconfig": f"users:\n- user:\n    client-key-data: {HIDDEN}\n    client-certificate-data: {HIDDEN}\n",
    "the CA of a kubeconfig": f"    certificate-authority-data: {HIDDEN}\n",
    "a private key": f"x\n-----BEGIN EC PRIVATE KEY-----\n{HIDDEN}\n-----END EC PRIVATE KEY-----\ny\n",
    "a certificate": f"-----BEGIN CERTIFICATE-----\n{HIDDEN}\n-----END CERTIFICATE-----\n",
    "a truncated key": f"-----BEGIN PRIVATE KEY-----\n{HIDDEN}\n",
    "an option of a program": f"ExecStart=/usr/bin/x --token={HIDDEN}\n",
    "a variable": f'Environment="API_KEY={HIDDEN}"\n',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_secrets_in_texts_are_hidden(text: str) -> None:
    assert HIDDEN in text
    masked = Mask().text(text)
    assert HIDDEN not in masked
    assert re.search(r"\(secret \d\)", masked)


def test_what_follows_a_secret_is_shown() -> None:
    assert Mask().text("a:\n  token: |\n    x\n\n    y\n  b: 1\nc: 2\n") == "a:\n  token: (secret 1)\n  b: 1\nc: 2\n"
    assert Mask().text("password=x\n\nuser=y\n") == "password=(secret 1)\n\nuser=y\n"
    assert Mask().text('{\n "auth": "x",\n "y": 1\n}\n') == '{\n "auth": (secret 1)\n "y": 1\n}\n'


def test_tokens_are_recognised_wherever_they_are() -> None:
    token, jwt = "abcdef.0123456789abcdef", "eyJhbGciOi.eyJzdWIiOi.sig-nature"
    assert Mask().text(f"kubeadm join --token {token} x {jwt} {token}") == (
        "kubeadm join --token (secret 1) x (secret 2) (secret 1)"
    )


ORDINARY = (
    "automountServiceAccountToken: false\ntokenTTL: 24h\nsecretName: tls\n",
    "authentication:\n  anonymous:\n    enabled: false\nauthorization:\n  mode: Webhook\n",
    "-----BEGIN PGP PUBLIC KEY BLOCK-----\nmQENBF\n-----END PGP PUBLIC KEY BLOCK-----\n",
    "Types: deb\nURIs: https://pkgs.k8s.io/core:/stable:/v1.36/deb/\nSigned-By: /etc/apt/keyrings/x.asc\n",
    "UUID=1 / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n",
    "net.ipv4.ip_forward = 1\n",
    '{\n  "auths": {\n    "r.io": {}\n  }\n}\n',
)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_lines_are_shown(text: str) -> None:
    assert Mask().text(text) == text


OBJECTS: dict[str, dict[str, Any]] = {
    "a Secret": {
        "kind": "Secret",
        "metadata": {
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": json.dumps({"data": {"a": HIDDEN}})}
        },
        "data": {"a": HIDDEN},
        "stringData": {"b": HIDDEN},
    },
    "a list of Secrets": {"kind": "List", "items": [{"kind": "Secret", "data": {"a": HIDDEN}}]},
    "an encryption configuration": {"resources": [{"providers": [{"secretbox": {"keys": [{"secret": HIDDEN}]}}]}]},
    "an environment": {"containers": [{"env": [{"name": "DB_PASSWORD", "value": HIDDEN}]}]},
    "an argument": {"apiServer": {"extraArgs": [{"name": "oidc-client-secret", "value": HIDDEN}]}},
    "a file in a ConfigMap": {"kind": "ConfigMap", "data": {"registry.toml": f'password = "{HIDDEN}"\n'}},
    "a join configuration": {"discovery": {"bootstrapToken": {"token": HIDDEN}}, "certificateKey": HIDDEN},
    "a number": {"pin": {"password": 1234567890}},
}


@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_secrets_in_objects_are_hidden(obj: dict[str, Any]) -> None:
    masked = json.dumps(Mask().value(obj))
    assert HIDDEN not in masked
    assert "1234567890" not in masked
    assert "(secret 1)" in masked


def test_an_ordinary_object_is_shown() -> None:
    obj = {
        "kind": "DaemonSet",
        "metadata": {"name": "x", "labels": {"a": "b"}},
        "spec": {
            "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
            "volumes": [{"secret": {"secretName": "tls"}}],
            "imagePullSecrets": [{"name": "registry"}],
            "automountServiceAccountToken": False,
            "extraArgs": [{"name": "enable-bootstrap-token-auth", "value": "true"}],
            "replicas": 3,
            "nothing": None,
        },
    }
    assert Mask().value(obj) == obj


def test_a_change_of_a_secret_is_shown_and_the_secret_is_not() -> None:
    def secret(value: str) -> dict[str, Any]:
        return {"kind": "Secret", "data": {"a": base64.b64encode(value.encode()).decode(), "same": "eA=="}}

    (found,) = shown([Difference("Secret x", secret("old"), secret("new"))])
    assert found["before"]["data"] == {"a": "(secret 1)", "same": "(secret 2)"}
    assert found["after"]["data"] == {"a": "(secret 3)", "same": "(secret 2)"}
    (text,) = shown([Difference("x", "password=a\n", "password=b\n")])
    assert (text["before"], text["after"]) == ("password=(secret 1)\n", "password=(secret 2)\n")


def test_differences_with_the_same_title_are_shown_as_one() -> None:
    packages = [Difference("packages", {"a": "1"}, {"a": "2"}), Difference("packages", {}, {"b": "1"})]
    rewritten = [Difference("/f", "1\n", "2\n"), Difference("/f", "2\n", "3\n")]
    undone = [Difference("/g", "1\n", "2\n"), Difference("/g", "2\n", "1\n")]
    found = shown([*packages, *rewritten, *undone])
    assert found == [
        {
            "before": {"a": "1"},
            "after": {"a": "2", "b": "1"},
            "before_header": "packages",
            "after_header": "packages",
        },
        {"before": "1\n", "after": "3\n", "before_header": "/f", "after_header": "/f"},
    ]


def test_a_file_that_not_everyone_may_read_is_secret_as_a_whole(tmp_path: Any) -> None:
    path = tmp_path / "config"
    path.write_text("theirs\n")
    path.chmod(0o640)
    found = shown(of_file(str(path), "ours\n", 0o644, path.stat().st_uid))
    assert [(each["before"], each["after"]) for each in found] == [
        ("(secret 1)", "ours\n"),
        ({"mode": "0640", "owner": path.stat().st_uid}, {"mode": "0644", "owner": path.stat().st_uid}),
    ]
    assert shown(of_file(str(path), "theirs\n", 0o640, path.stat().st_uid)) == []
    (empty,) = shown(of_file(str(tmp_path / "new"), "", 0o644))
    assert empty["after"] == {"mode": "0644", "owner": 0}
    (folder,) = shown(of_file(str(tmp_path), None))
    assert (folder["before"], folder["after"]) == ("(not a regular file)\n", "")


def test_text_that_utf_8_cannot_encode_is_replaced() -> None:
    (found,) = shown([Difference("/f\udc80", "a\udcff\n", Secret("\udcff"))])
    json.dumps(found, ensure_ascii=False).encode()
    assert found["before"] == "a?\n"


@pytest.mark.parametrize(
    "repeated",
    ["auth ", "token  ", "eyJ-", "eyJ-.", "://a:", "-----BEGIN X-----", "Basic ", "\n", "\n a=", "token=x\n\n"],
)
def test_hiding_takes_time_that_grows_with_the_text_only(repeated: str) -> None:
    began = time.process_time()
    Mask().text(repeated * 20_000)
    assert time.process_time() - began < 5


def test_an_object_of_another_shape_is_no_error() -> None:
    for odd in ("text", None, ["x"], 5):
        found = Mask().value({"kind": "Secret", "metadata": odd, "data": odd, "stringData": {"a": odd}, "name": odd})
        assert found["metadata"] == odd
    assert Mask().value({"kind": "Secret", "metadata": {"annotations": "x"}})["metadata"] == {"annotations": "x"}
