"""The messages of the autoscaler's external gRPC provider, and the parts of Kubernetes' Node that a template needs.

Sources: k8s.io/autoscaler/cluster-autoscaler 1.33, cloudprovider/externalgrpc/protos/externalgrpc.proto;
k8s.io/api/core/v1 and k8s.io/apimachinery, generated.proto. From 1.35 on, the template is in ``nodeBytes``: the same
bytes under another number, so that an answer with both fits every release. What no answer here uses is left out: on the
wire, unknown fields are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "clusterautoscaler.cloudprovider.v1.externalgrpc"
_Field = descriptor_pb2.FieldDescriptorProto
_TEXT, _NUMBER, _BYTES = _Field.TYPE_STRING, _Field.TYPE_INT32, _Field.TYPE_BYTES
_MANY, _MAP = "many", "map"

# Each message: its fields, as (name, number, type, many or map). A type in quotes is a message of this table.
_MESSAGES: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "NodeGroup": (("id", 1, _TEXT), ("minSize", 2, _NUMBER), ("maxSize", 3, _NUMBER), ("debug", 4, _TEXT)),
    "ExternalGrpcNode": (("providerID", 1, _TEXT), ("name", 2, _TEXT)),
    "NodeGroupsRequest": (),
    "NodeGroupsResponse": (("nodeGroups", 1, "NodeGroup", _MANY),),
    "NodeGroupForNodeRequest": (("node", 1, "ExternalGrpcNode"),),
    "NodeGroupForNodeResponse": (("nodeGroup", 1, "NodeGroup"),),
    "GPULabelRequest": (),
    "GPULabelResponse": (("label", 1, _TEXT),),
    "GetAvailableGPUTypesRequest": (),
    # A map whose values no answer here has.
    "GetAvailableGPUTypesResponse": (),
    "CleanupRequest": (),
    "CleanupResponse": (),
    "RefreshRequest": (),
    "RefreshResponse": (),
    "NodeGroupTargetSizeRequest": (("id", 1, _TEXT),),
    "NodeGroupTargetSizeResponse": (("targetSize", 1, _NUMBER),),
    "NodeGroupIncreaseSizeRequest": (("delta", 1, _NUMBER), ("id", 2, _TEXT)),
    "NodeGroupIncreaseSizeResponse": (),
    "NodeGroupDeleteNodesRequest": (("nodes", 1, "ExternalGrpcNode", _MANY), ("id", 2, _TEXT)),
    "NodeGroupDeleteNodesResponse": (),
    "NodeGroupDecreaseTargetSizeRequest": (("delta", 1, _NUMBER), ("id", 2, _TEXT)),
    "NodeGroupDecreaseTargetSizeResponse": (),
    "NodeGroupNodesRequest": (("id", 1, _TEXT),),
    "NodeGroupNodesResponse": (("instances", 1, "Instance", _MANY),),
    "Instance": (("id", 1, _TEXT), ("status", 2, "InstanceStatus")),
    "InstanceStatus": (("instanceState", 1, _NUMBER), ("errorInfo", 2, "InstanceErrorInfo")),
    "InstanceErrorInfo": (("errorCode", 1, _TEXT), ("errorMessage", 2, _TEXT), ("instanceErrorClass", 3, _NUMBER)),
    "NodeGroupTemplateNodeInfoRequest": (("id", 1, _TEXT),),
    "NodeGroupTemplateNodeInfoResponse": (("nodeInfo", 1, "Node"), ("nodeBytes", 2, _BYTES)),
    # Kubernetes
    "Node": (("metadata", 1, "ObjectMeta"), ("spec", 2, "NodeSpec"), ("status", 3, "NodeStatus")),
    "ObjectMeta": (("name", 1, _TEXT), ("labels", 11, _TEXT, _MAP)),
    "NodeSpec": (("providerID", 3, _TEXT), ("taints", 5, "Taint", _MANY)),
    "Taint": (("key", 1, _TEXT), ("value", 2, _TEXT), ("effect", 3, _TEXT)),
    "NodeStatus": (
        ("capacity", 1, "Quantity", _MAP),
        ("allocatable", 2, "Quantity", _MAP),
        ("conditions", 4, "NodeCondition", _MANY),
    ),
    "NodeCondition": (("type", 1, _TEXT), ("status", 2, _TEXT)),
    "Quantity": (("string", 1, _TEXT),),
}
CREATING, RUNNING, DELETING = 2, 1, 3
"""InstanceStatus.InstanceState."""
OUT_OF_RESOURCES = 1
"""InstanceErrorClass: the autoscaler takes another pool for a while. Source: cloudprovider/cloud_provider.go."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="gpunodes/externalgrpc.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, *form in fields:
            field = message.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
            if form:
                field.label = _Field.LABEL_REPEATED
            if form == [_MAP]:
                entry = f"{field_name.capitalize()}Entry"
                inner = message.nested_type.add(name=entry)
                inner.options.map_entry = True
                inner.field.add(name="key", number=1, type=_TEXT, label=_Field.LABEL_OPTIONAL)
                _typed(inner.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
                _typed(field, f"{name}.{entry}")
            else:
                _typed(field, kind)
    return file


def _typed(field: Any, kind: Any) -> None:
    if isinstance(kind, str):
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = kind


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
