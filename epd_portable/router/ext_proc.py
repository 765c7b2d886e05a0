"""What Envoy and an external processor tell each other, as far as it is used here.

This is ``envoy.service.ext_proc.v3``, and ``grpc.health.v1``. Field numbers and types are those of
the public APIs; fields that are left out are skipped when they come. The tests compare the table
with the published definitions. Why it is not taken from a package:
docs/decisions/0036-envoy-carries-the-bytes.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

METHOD = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
"""Service and method of gRPC; a stream of requests and one of responses."""
HEALTH = ("grpc.health.v1.Health", "Check")
"""The same of health checks; one request and one response."""
SERVING, NOT_SERVING = 1, 2

# Values of enumerations, which travel as numbers.
BUFFERED = 2
FULL_DUPLEX_STREAMED = 4
"""How a body is sent: whole, or in pieces of which the answers are pieces again."""
CONTINUE_AND_REPLACE = 1
"""Send the body of this response in place of the one that there is."""
OVERWRITE = 2
"""Set a header, whatever it was."""

Field = tuple[int, str]
"""Number and type; ``*`` before the type: any number of them. A map is any number of entries."""

MESSAGES: Mapping[str, Mapping[str, Field]] = {
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "ProtocolConfiguration": {
        "request_body_mode": (1, "int32"),
        "response_body_mode": (2, "int32"),
    },
    "Metadata": {"filter_metadata": (1, "*MetadataEntry")},
    "MetadataEntry": {"key": (1, "string"), "value": (2, "Struct")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
        "mode_override": (9, "ProcessingMode"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "CommonResponse": {
        "status": (1, "int32"),
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "BodyMutation": {"body": (1, "bytes"), "streamed_response": (3, "StreamedBodyResponse")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
    },
    "HttpStatus": {"code": (1, "int32")},
    "ProcessingMode": {"request_body_mode": (3, "int32"), "response_body_mode": (4, "int32")},
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int32")},
}
"""Fields of each message."""

_PACKAGE = "epd_portable.ext_proc"
_TYPES = dict(descriptor_pb2.FieldDescriptorProto.Type.items())


def _classes() -> Mapping[str, Any]:
    """Return a class for each message.

    They are in a pool of their own: other packages of the process may bring Envoy's names, too.
    """
    struct = struct_pb2.DESCRIPTOR
    file = descriptor_pb2.FileDescriptorProto(
        name="epd_portable/ext_proc.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[struct.name],
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            bare = kind.lstrip("*")
            added = message.field.add(name=field, number=number)
            added.label = added.LABEL_REPEATED if kind != bare else added.LABEL_OPTIONAL
            added.type = _TYPES.get(f"TYPE_{bare.upper()}", added.TYPE_MESSAGE)
            if added.type == added.TYPE_MESSAGE:
                package = struct.package if bare == "Struct" else _PACKAGE
                added.type_name = f".{package}.{bare}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in MESSAGES
    }


_made = _classes()
ProcessingRequest: Any = _made["ProcessingRequest"]
ProcessingResponse: Any = _made["ProcessingResponse"]
HealthCheckRequest: Any = _made["HealthCheckRequest"]
HealthCheckResponse: Any = _made["HealthCheckResponse"]


def header_mutation(given: Mapping[str, str], removed: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a ``HeaderMutation``."""
    headers = [{"key": name, "raw_value": text.encode("latin-1")} for name, text in given.items()]
    options = [{"header": header, "append_action": OVERWRITE} for header in headers]
    return {"set_headers": options, "remove_headers": removed}


def metadata_value(request: Any, namespace: str, name: str) -> Any:
    """Return what a ``ProcessingRequest`` says of a name; ``None`` for nothing."""
    for entry in request.metadata_context.filter_metadata:
        if entry.key == namespace and name in entry.value:
            return entry.value[name]
    return None
