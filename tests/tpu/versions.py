"""Requests of v2alpha1 as those of v2, in which the stand-in keeps everything; field numbers differ."""

from __future__ import annotations

from typing import Any

from google.cloud import tpu_v2
from google.protobuf import json_format

SHARED = ("name", "parent", "force", "page_size", "page_token", "query_path")


def as_v2(request: Any, rpc: str) -> Any:
    """The same request in the messages of v2.

    Args:
      request: a protobuf message of v2alpha1.
      rpc: its method.
    """
    own = getattr(tpu_v2, f"{rpc}Request").pb()()
    if rpc != "CreateQueuedResource":
        for name in SHARED:
            if name in own.DESCRIPTOR.fields_by_name and name in request.DESCRIPTOR.fields_by_name:
                setattr(own, name, getattr(request, name))
        return own
    plain = json_format.MessageToDict(request, preserving_proto_field_name=True)
    body = plain["queued_resource"]
    for spec in body["tpu"]["node_spec"]:
        if several := spec.pop("multi_node_params", None):
            several.pop("workload_type", None)
            spec["multislice_params"] = several
    body.get("guaranteed", {}).pop("reserved", None)
    json_format.ParseDict(plain, own)
    return own
