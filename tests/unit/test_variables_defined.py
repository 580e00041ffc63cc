"""Each variable that a playbook or role uses is defined somewhere: Ansible finds a missing one on users' machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment, meta

ROOT = Path(__file__).parents[2]
ANSIBLE = {
    "ansible_check_mode",
    "ansible_config_file",
    "ansible_host",
    "ansible_inventory_sources",
    "ansible_limit",
    "ansible_play_hosts",
    "ansible_play_hosts_all",
    "ansible_playbook_python",
    "ansible_run_tags",
    "ansible_skip_tags",
    "ansible_version",
    "group_names",
    "groups",
    "hostvars",
    "inventory_hostname",
    "item",
    "lookup",
    "omit",
}
"""Variables and functions of Ansible itself (docs.ansible.com, Special Variables)."""
GIVEN = {
    *("kubelet_fields", "upgrade_minor", "upgrade_parts", "upgrade_requested"),
    *("upgrade_returns", "upgrade_target"),
    *("wiring_given_registry", "wiring_moving", "wiring_new_endpoint"),
}
"""Given by a command, or with -e, as the playbook says at its top."""


class _All(dict[str, Any]):
    """All names: Ansible's filters and tests are not loaded here."""

    def __contains__(self, _: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def get(self, name: str, _: Any = None) -> Any:
        return dict.get(self, name) or (lambda *_, **__: None)


def strings(value: Any) -> Iterator[str]:
    """All strings in a YAML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def files() -> list[Path]:
    # Not meta, and not files, which are data of others: an alert rule has expressions of Prometheus.
    return sorted([*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/[!mf]*/**/*.yml")])


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of regular expressions, as Ansible takes them
def test_no_expression_uses_a_variable_that_nothing_defines() -> None:
    environment = Environment()  # noqa: S701 - it parses, and renders nothing
    environment.filters, environment.tests = _All(environment.filters), _All(environment.tests)
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    defined = ANSIBLE | GIVEN
    for text in texts.values():
        defined |= set(re.findall(r"(?m)^\s*(?:- )?([A-Za-z_]\w*):", text)) | set(re.findall(r"register: (\w+)", text))
        defined |= set(re.findall(r"loop_var: (\w+)", text))
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path, text in texts.items()
        for string in strings(yaml.safe_load(text))
        if "{{" in string or "{%" in string
        for name in meta.find_undeclared_variables(environment.parse(string))
        if name not in defined
    }
    assert missing == set()
    assert len(texts) > 150, "all of them were read"
