"""Errors of object storage.

OSError
|-- UnreadableInput      worker.lines.errors: also an object that cannot be read
`-- StorageError         a URL that cannot be used, or an object that cannot be listed or written
    `-- StorageMissing   the packages for it are not installed
"""

from __future__ import annotations


class StorageError(OSError):
    """Something about one URL, named in the message without what is secret in it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class StorageMissing(StorageError):
    """obstore or botocore is not installed."""

    def __init__(self, name: str) -> None:
        command = 'pip install "obstore>=0.12.1,<0.13" "botocore>=1.40,<2"'
        super().__init__(name, f"object storage needs the extra storage, which is not installed: {command}")
