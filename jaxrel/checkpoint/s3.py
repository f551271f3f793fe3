"""How fsspec, and so epath and Orbax, reach S3."""

import errno
import os
from typing import Any

from botocore.exceptions import BotoCoreError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem


class S3(S3FileSystem):
    """Every look is at the store itself, and trouble on the way there is an OSError."""

    retries = 1  # the client below retries on its own

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"use_listings_cache": False, **options})

    async def _call_s3(self, *args: Any, **options: Any) -> Any:
        try:
            return await super()._call_s3(*args, **options)
        except BotoCoreError as error:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {error}") from error

    def mkdir(self, path: str, *args: Any, **options: Any) -> None:
        """Nothing: a folder is what is in it. s3fs would make a bucket of a mistyped name."""

    makedirs = mkdir

    call_s3 = sync_wrapper(_call_s3)  # what an open file writes by
