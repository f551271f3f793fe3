"""A checkpoint directory in an object store, `s3://bucket/prefix`: `pip install jaxrel[s3]`.

Endpoint, region and credentials come from where AWS's tools look: `AWS_ENDPOINT_URL`,
`AWS_REGION`, `AWS_ACCESS_KEY_ID`, the files in `~/.aws`, or the instance. An object store
cannot rename a folder, and a folder is no more than the names of what is in it. So a save
writes into a folder of its own, and one small object written last makes it complete.
"""

import importlib.util
import os
from typing import Any

import fsspec
from etils import epath

from jaxrel.exit_codes import UsageError

_SCHEME = "s3://"
_RETRIES = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "10s"}
"""Half a minute in all; TensorStore's own would be a quarter of an hour."""
_STALLED = {"CONNECT_TIMEOUT_SECONDS": 10, "LOW_SPEED_TIME_SECONDS": 30, "LOW_SPEED_LIMIT_BYTES": 1}
"""TensorStore waits for ever for a server that took a request and is silent."""


def remote(path: epath.PathLike) -> bool:
    """Whether `path` is in an object store."""
    return os.fspath(path).startswith(_SCHEME)


def place(directory: epath.PathLike) -> epath.Path:
    """The checkpoint directory that a user named. Raises UsageError for another scheme."""
    name = os.fspath(directory)
    if "://" not in name:
        return epath.Path(name).expanduser().resolve()
    if not remote(name) or not name.removeprefix(_SCHEME).strip("/"):
        raise UsageError(f"checkpoint directory {name}: expected a path, or s3://bucket/prefix")
    if importlib.util.find_spec("s3fs") is None:
        raise UsageError(f"checkpoint directory {name}: needs `pip install jaxrel[s3]`")
    fsspec.register_implementation("s3", "jaxrel.checkpoint.s3.S3", clobber=True)
    for variable, value in _STALLED.items():
        os.environ.setdefault(f"TENSORSTORE_CURL_{variable}", str(value))
    return epath.Path(name.rstrip("/"))


def objects(folder: epath.Path) -> dict[str, int]:
    """Names of all that is below `folder`, with their bytes. Raises OSError."""
    root = os.fspath(folder).removeprefix(_SCHEME)
    found = fsspec.filesystem("s3").find(root, detail=True).items()
    return {name[len(root) + 1 :]: it["size"] for name, it in found if it["type"] == "file"}


def kvstore(folder: str) -> dict[str, Any]:
    """TensorStore's spec of `folder`, `s3://bucket/name/.../name`; it reads no endpoint itself."""
    bucket, _, path = folder.removeprefix(_SCHEME).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": f"{path.rstrip('/')}/"}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # else it looks everywhere, and complains of each
        spec["aws_credentials"] = {"type": "environment"}
    return {**spec, "s3_request_retries": _RETRIES}
