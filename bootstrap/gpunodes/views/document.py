"""The JSON documents of the commands. Schema names are stable: a change of meaning needs a new number."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gpunodes.ansible.module_utils.problem import Problem
from gpunodes.errors import GpunodesError
from gpunodes.model import RunResult


def run(result: RunResult) -> str:
    """``gpunodes.run/1``: the result of a command on each machine."""
    document = {
        "schema": "gpunodes.run/1",
        "command": result.command,
        "exit_code": int(result.exit_code),
        "dry_run": result.dry_run,
        "interrupted": result.interrupted,
        "machines": [
            {**dataclasses.asdict(machine), "seconds": round(machine.seconds, 1)} for machine in result.machines
        ],
        "findings": [
            {
                "machine": finding.machine,
                "check": finding.check,
                **conflict(finding.problem),
                "severity": finding.severity,
            }
            for finding in result.findings
        ],
        "log": result.log,
    }
    return dump(document)


def error(failure: GpunodesError) -> str:
    """``gpunodes.error/1``: why a command failed or stopped."""
    return dump(
        {
            "schema": "gpunodes.error/1",
            "exit_code": int(failure.exit_code),
            **dataclasses.asdict(failure.problem),
            "problems": [dataclasses.asdict(each) for each in failure.problems],
        }
    )


def conflict(problem: Problem) -> dict[str, str]:
    """A finding or conflict: in documents, its two parts have other names than those of an error."""
    return {"fact": problem.found, "limit": problem.wanted, "remedy": problem.remedy}


def as_yaml(text: str) -> str:
    """A JSON document as YAML."""
    import yaml

    found: str = yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True)
    return found.rstrip()


def tunnel(document: Mapping[str, Any]) -> str:
    """``gpunodes.tunnel/1``, on one line: a command that stays open prints it once its tunnel leads there."""
    return json.dumps({"schema": "gpunodes.tunnel/1", **document})


def dump(document: Mapping[str, Any]) -> str:
    """One document as indented JSON."""
    return json.dumps(document, indent=2)
