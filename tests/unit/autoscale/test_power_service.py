"""The gRPC service, asked as the autoscaler asks it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from gpunodes.autoscale import messages, service
from gpunodes.autoscale.messages import message
from gpunodes.engine.cluster.marks import NEEDS_REPAIR

from tests.power_fleet import GPU, Site, parsed

Ask = Callable[..., Any]


@pytest.fixture
def site() -> Site:
    return Site(parsed({"w1": "h100", "w2": "h100", "w3": "t4"}, {"h100": (0, 2, 50), "t4": (0, 1, 10)}))


@pytest.fixture
def ask(site: Site, tmp_path: Path) -> Iterator[Ask]:
    address = f"unix:{tmp_path}/power"
    listening = service.start(site.server, address)
    with grpc.insecure_channel(address) as channel:

        def call(name: str, **fields: Any) -> Any:
            return channel.unary_unary(
                f"/{messages.PACKAGE}.CloudProvider/{name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=message(f"{name}Response").FromString,
            )(message(f"{name}Request")(**fields), timeout=10)

        yield call
    listening.stop(None)


def test_pools_and_their_nodes(ask: Ask) -> None:
    groups = ask("NodeGroups").nodeGroups
    assert [(each.id, each.minSize, each.maxSize) for each in groups] == [("h100", 0, 2), ("t4", 0, 1)]
    assert ask("NodeGroupForNode", node={"providerID": "gpunodes://w3"}).nodeGroup.id == "", "it is off"
    ask("NodeGroupIncreaseSize", id="t4", delta=1)
    assert ask("NodeGroupForNode", node={"providerID": "gpunodes://w3"}).nodeGroup.id == "t4"
    assert ask("NodeGroupForNode", node={"providerID": "", "name": "w3"}).nodeGroup.id == ""
    assert ask("GPULabel").label == "gpunodes.dev/gpu"


def test_a_node_with_the_provider_id_of_another_machine_is_in_no_pool(ask: Ask, site: Site) -> None:
    """Root on a node gives it any: with the node the autoscaler would have switched the other machine off."""
    ask("NodeGroupIncreaseSize", id="h100", delta=1)
    for name in ("w1", "gpunodes://w1", ""):
        assert ask("NodeGroupForNode", node={"providerID": "gpunodes://w1", "name": name}).nodeGroup.id == "h100"
    claimed = {"providerID": "gpunodes://w1", "name": "other"}
    assert ask("NodeGroupForNode", node=claimed).nodeGroup.id == ""
    with pytest.raises(grpc.RpcError) as caught:
        ask("NodeGroupDeleteNodes", id="h100", nodes=[claimed])
    assert "the node other with the provider id gpunodes://w1 is no machine of a pool" in caught.value.details()
    site.until(lambda: site.machines.orders == [("w1", "on")])


def test_a_machine_starts_and_is_shown_as_starting(ask: Ask, site: Site) -> None:
    ask("NodeGroupIncreaseSize", id="h100", delta=1)
    assert ask("NodeGroupTargetSize", id="h100").targetSize == 1
    [instance] = ask("NodeGroupNodes", id="h100").instances
    assert (instance.id, instance.status.instanceState) == ("gpunodes://w1", messages.CREATING)
    assert not instance.status.HasField("errorInfo")
    site.until(lambda: site.machines.orders == [("w1", "on")])


def test_a_bmc_that_refuses_makes_the_autoscaler_take_another_pool(ask: Ask, site: Site) -> None:
    site.machines.refuses = {"w1"}
    ask("NodeGroupIncreaseSize", id="h100", delta=1)
    site.until(lambda: site.store.states()["w1"].error)
    [instance] = ask("NodeGroupNodes", id="h100").instances
    assert instance.status.errorInfo.instanceErrorClass == messages.OUT_OF_RESOURCES
    assert "refuses" in instance.status.errorInfo.errorMessage


def test_a_template_is_a_node_under_both_numbers(ask: Ask) -> None:
    found = ask("NodeGroupTemplateNodeInfo", id="t4")
    assert found.nodeInfo.status.allocatable[GPU].string == "2"
    assert found.nodeInfo.metadata.labels["gpunodes.dev/gpu"] == "true"
    assert message("Node").FromString(found.nodeBytes) == found.nodeInfo


def test_an_error_is_a_sentence(ask: Ask) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask("NodeGroupIncreaseSize", id="h100", delta=3)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "the pool h100 has 0 machines on" in caught.value.details()
    with pytest.raises(grpc.RpcError) as caught:
        ask("NodeGroupTargetSize", id="nothing")
    assert "there is no pool nothing" in caught.value.details()


def test_what_a_node_writes_reaches_the_autoscaler_in_one_line(ask: Ask, site: Site) -> None:
    """It logs what it is told. Root on a node writes any annotation, and any provider id."""
    ask("NodeGroupIncreaseSize", id="h100", delta=1)
    site.boots("w1", annotations={NEEDS_REPAIR: "\x1b[2Jno\n2027 w2: off"})
    site.look()
    for asked in ({"providerID": "gpunodes://w1"}, {"providerID": "\x1b[2J\n2027 w2: off", "name": "w1"}):
        with pytest.raises(grpc.RpcError) as caught:
            ask("NodeGroupDeleteNodes", id="h100", nodes=[asked])
        assert " 2027 w2: off" in caught.value.details()
        assert caught.value.details().isprintable()


PROGRAM = """
import logging, sys
from gpunodes.autoscale import __main__ as program
log = logging.getLogger("gpunodes.autoscale.server")
def serve(*_):
    log.info("%s: needs repair: %s", "w1", "\\x1b[2Jno\\n2027 w2: off\\u202e")
    try:
        raise ValueError("\\x1b[2J")
    except ValueError:
        log.exception("odd")
    return 0
program._serve = serve
sys.exit(program.main())
"""


def test_the_log_has_one_printable_line_for_each_entry() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.isprintable() for line in lines] == [True, True], done.stdout
    assert lines[0].endswith("w1: needs repair:  [2Jno 2027 w2: off ")
    assert "ValueError" in lines[1]
    assert not done.stderr


def test_calls_that_are_not_offered_are_unimplemented(site: Site, tmp_path: Path) -> None:
    """The autoscaler takes its own options then; those of a pool have other forms in each release."""
    address = f"unix:{tmp_path}/power"
    listening = service.start(site.server, address)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{messages.PACKAGE}.CloudProvider/NodeGroupGetOptions")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=10)
    listening.stop(None)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
