"""The power server's gRPC service: the autoscaler's calls, in its words. The only file that uses grpcio.

It listens on a socket in a folder that only the two containers of the pod have: who calls it switches machines.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from gpunodes.ansible.module_utils.scaling import PROVIDER
from gpunodes.autoscale import messages
from gpunodes.autoscale.messages import message
from gpunodes.autoscale.plan import NodeShape
from gpunodes.autoscale.server import NotPossible, PowerServer
from gpunodes.autoscale.state import MachineState, Phase
from gpunodes.errors import GpunodesError, sentence
from gpunodes.model import printable

log = logging.getLogger(__name__)
ADDRESS = "unix:///run/gpunodes/power/socket"
GPU_LABEL = "gpunodes.dev/gpu"
_CALLS_AT_ONCE = 4
_SERVICE = f"{messages.PACKAGE}.CloudProvider"
_STATES = {Phase.STARTING: messages.CREATING, Phase.STOPPING: messages.DELETING}

_CALLS = {
    "NodeGroups": "node_groups",
    "NodeGroupForNode": "node_group_for_node",
    "GPULabel": "gpu_label",
    "GetAvailableGPUTypes": "get_available_gpu_types",
    "Cleanup": "cleanup",
    "Refresh": "refresh",
    "NodeGroupTargetSize": "node_group_target_size",
    "NodeGroupIncreaseSize": "node_group_increase_size",
    "NodeGroupDeleteNodes": "node_group_delete_nodes",
    "NodeGroupDecreaseTargetSize": "node_group_decrease_target_size",
    "NodeGroupNodes": "node_group_nodes",
    "NodeGroupTemplateNodeInfo": "node_group_template_node_info",
}
"""The calls of the service, and the methods that answer them."""


class Service:
    """A method for each call."""

    def __init__(self, server: PowerServer) -> None:
        self._server = server

    def node_groups(self, _: Any) -> Any:
        """All pools."""
        return message("NodeGroupsResponse")(nodeGroups=[self._group(pool) for pool in sorted(self._server.plan.pools)])

    def node_group_for_node(self, request: Any) -> Any:
        """The pool of a node, with an empty id for a node of none."""
        pool = self._server.pool_of(request.node.providerID, request.node.name)
        return message("NodeGroupForNodeResponse")(nodeGroup=self._group(pool) if pool else message("NodeGroup")())

    def gpu_label(self, _: Any) -> Any:
        """The label of nodes with GPUs: such a node without GPUs counts as starting."""
        return message("GPULabelResponse")(label=GPU_LABEL)

    def get_available_gpu_types(self, _: Any) -> Any:
        """None: pools are chosen by what their nodes offer."""
        return message("GetAvailableGPUTypesResponse")()

    def cleanup(self, _: Any) -> Any:
        """The autoscaler ends; orders go on."""
        return message("CleanupResponse")()

    def refresh(self, _: Any) -> Any:
        """The autoscaler begins to decide; answers are from memory, which is renewed by a thread of its own."""
        return message("RefreshResponse")()

    def node_group_target_size(self, request: Any) -> Any:
        """How many machines of a pool are on or starting."""
        return message("NodeGroupTargetSizeResponse")(targetSize=self._server.size(request.id).target)

    def node_group_increase_size(self, request: Any) -> Any:
        """Switch machines on."""
        self._server.increase(request.id, request.delta)
        return message("NodeGroupIncreaseSizeResponse")()

    def node_group_delete_nodes(self, request: Any) -> Any:
        """Switch machines off."""
        self._server.delete(request.id, [self._provider(node) for node in request.nodes])
        return message("NodeGroupDeleteNodesResponse")()

    def node_group_decrease_target_size(self, request: Any) -> Any:
        """Give up starts. The number is negative."""
        self._server.decrease(request.id, -request.delta)
        return message("NodeGroupDecreaseTargetSizeResponse")()

    def node_group_nodes(self, request: Any) -> Any:
        """The machines of a pool that are on or change."""
        found = self._server.instances(request.id)
        return message("NodeGroupNodesResponse")(instances=[_instance(name, state) for name, state in found])

    def node_group_template_node_info(self, request: Any) -> Any:
        """A node as the next machine of a pool would make it."""
        node = _node(request.id, self._server.template(request.id))
        return message("NodeGroupTemplateNodeInfoResponse")(nodeInfo=node, nodeBytes=node.SerializeToString())

    def _provider(self, node: Any) -> str:
        provider = node.providerID or f"{PROVIDER}{node.name}"
        if not self._server.planned_pool(provider, node.name):
            raise NotPossible(f"the node {node.name} with the provider id {provider} is no machine of a pool", "", "")
        return str(provider)

    def _group(self, pool: str) -> Any:
        found = self._server.size(pool)
        return message("NodeGroup")(id=pool, minSize=found.least, maxSize=found.most, debug=f"machines of {pool}")


def _instance(name: str, state: MachineState) -> Any:
    status = message("InstanceStatus")(instanceState=_STATES.get(state.phase, messages.RUNNING))
    if state.phase is Phase.STARTING and state.error:
        status.errorInfo.errorCode = "NotStarted"
        status.errorInfo.errorMessage = printable(state.error)
        status.errorInfo.instanceErrorClass = messages.OUT_OF_RESOURCES
    return message("Instance")(id=PROVIDER + name, status=status)


def _node(pool: str, found: NodeShape) -> Any:
    node = message("Node")()
    node.metadata.name = f"template-{pool}"
    node.metadata.labels.update(found.labels)
    for taint in found.taints:
        node.spec.taints.add(key=taint["key"], value=taint.get("value", ""), effect=taint["effect"])
    for name, amount in found.capacity.items():
        node.status.capacity[name].string = amount
        node.status.allocatable[name].string = amount
    node.status.conditions.add(type="Ready", status="True")
    return node


def start(server: PowerServer, address: str = ADDRESS) -> grpc.Server:
    """Answer the autoscaler at a socket from now on."""
    service = Service(server)
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            functools.partial(_answer, getattr(service, method)),
            request_deserializer=message(f"{name}Request").FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )
        for name, method in _CALLS.items()
    }
    listening = grpc.server(ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="call"))
    listening.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    listening.add_insecure_port(address)
    listening.start()
    return listening


def _answer(call: Callable[[Any], Any], request: Any, context: grpc.ServicerContext) -> Any:
    """The answer of a call; an error as its sentence, which the autoscaler logs and shows in its Events."""
    try:
        return call(request)
    except NotPossible as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, printable(sentence(error)))
    except GpunodesError as error:
        log.warning("%s", sentence(error))
        context.abort(grpc.StatusCode.UNAVAILABLE, printable(sentence(error)))
