"""Opens the stores that URLs name through obstore, with the credentials of this machine and user.

Environment, profile and role are where they are read from; nothing of them is kept, sent to Redis or logged.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from worker.storage.urls import ObjectUrl, StorageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Credential

# A request that fails by the network or with a 5xx is repeated after 0.1 s, 0.2 s, 0.4 s and so on: for some 25 s.
MAX_RETRIES = 8
CONNECT_TIMEOUT_S = 10
REQUEST_TIMEOUT_S = 120  # a part of 8 MiB at 0.6 Mbit/s
CREDENTIALS_TTL_S = 600  # asked for anew then: botocore renews those of roles by itself

REPLACED = "it was replaced while it was read; accepted: an object that nobody writes to"

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3}[^:\n<]*)")
_DENIED = re.compile(r"status code: 40[13]\b")
_METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal", "fd00:ec2::254")


class StorageMissing(StorageError):
    """obstore or botocore is not installed."""

    def __init__(self, name: str) -> None:
        command = 'pip install "obstore>=0.12.1,<0.13" "botocore>=1.40,<2"'
        super().__init__(name, f"object storage needs the extra storage, which is not installed: {command}")


def open_store(url: ObjectUrl) -> ObjectStore:
    """The store of this URL's bucket, or of its web server. Raises StorageMissing and StorageError; asks no server.

    S3's keys are looked for as AWS' own tools do: environment, profile (AWS_PROFILE, ~/.aws), container and instance
    role; the others' as obstore does.
    """
    store = _import_store(url)
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        "allow_http": True,  # of an endpoint that says http:// itself; the vendors' are https://
    }
    retry: RetryConfig = {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_S)}
    with named_errors(url):
        if url.scheme == "s3":
            options = _s3_options(url)
            opened: ObjectStore = store.S3Store(url.bucket, client_options=client, retry_config=retry, **options)
        elif url.scheme == "gs":
            opened = store.GCSStore(url.bucket, client_options=client, retry_config=retry)
        elif url.scheme == "az":
            opened = store.AzureStore(url.bucket, client_options=client, retry_config=retry)
        else:
            opened = store.HTTPStore(url.bucket, client_options=client, retry_config=retry)
    return opened


def _import_store(url: ObjectUrl) -> Any:  # noqa: ANN401 - the module
    try:
        from obstore import store  # noqa: PLC0415 - an extra, and 0.1 s
    except ModuleNotFoundError as error:
        raise StorageMissing(url.name) from error
    return store


def _s3_options(url: ObjectUrl) -> dict[str, Any]:
    """Region, endpoint and keys as AWS' tools have them; no keys where there are none: perhaps none are needed."""
    try:
        import botocore.exceptions  # noqa: PLC0415 - an extra
        import botocore.session  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise StorageMissing(url.name) from error
    logging.getLogger("botocore").setLevel(logging.WARNING)  # at info it tells of every store where the keys were
    session = botocore.session.Session()
    try:
        found = session.get_credentials()
        if found is not None:
            found.get_frozen_credentials()  # an expired login is told here: later it would pass for missing rights
        region, profile = session.get_config_variable("region"), session.get_scoped_config()
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise StorageError(url.name, f"AWS' configuration or login: {error}") from error
    # botocore knows no AWS_REGION; what obstore is given here it takes before the environment's.
    region = os.environ.get("AWS_REGION") or region
    named = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next(filter(None, map(os.environ.get, named)), None) or profile.get("endpoint_url")
    options: dict[str, Any] = {} if region is None else {"region": region}
    if endpoint is not None:
        options["endpoint"] = endpoint
    if found is not None:
        options["credential_provider"] = _provider(found)
    return options


def _provider(credentials: Any) -> Callable[[], S3Credential]:  # noqa: ANN401 - botocore has no types
    def current() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_TTL_S),
        }

    return current


@contextmanager
def named_errors(url: ObjectUrl) -> Iterator[None]:
    """Raise StorageError, which names the URL and what is accepted, for what obstore raises in the block."""
    from obstore.exceptions import BaseError  # noqa: PLC0415 - an extra

    try:
        yield
    except StorageError:
        raise
    except (BaseError, OSError, ValueError) as error:  # what a writer is told comes as an OSError
        # Not `from error`: its text may hold a signature or a header.
        raise StorageError(url.name, _reason(url, error)) from None


def _reason(url: ObjectUrl, error: Exception) -> str:
    text = str(error)
    code = _CODE.search(text)
    said = f" ({code[1]})" if code else ""
    if any(place in text for place in _METADATA_SERVICES) or "Account must be specified" in text:
        return f"no credentials were found; accepted: {_CREDENTIALS[url.scheme]}"
    if code and code[1] in ("NoSuchBucket", "ContainerNotFound"):
        return "there is no such bucket"
    if isinstance(error, FileNotFoundError):
        return "there is no such object" if url.scheme not in ("https", "http") else "the server has no such file (404)"
    kind = type(error).__name__
    if kind in ("PermissionDeniedError", "PermissionError", "UnauthenticatedError") or _DENIED.search(text):
        return f"access is denied{said}; accepted, of somebody who may do this: {_CREDENTIALS[url.scheme]}"
    if kind == "PreconditionError":
        return REPLACED
    status = _STATUS.search(text)
    if status is not None:
        return f"its server answered {status[1].strip()}{said}"
    if "HTTP error" in text:
        return "its server cannot be reached, or broke off every answer"
    return text.partition("\n")[0] if url.scheme not in ("https", "http") else kind


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), a role of the machine, or"
    " AWS_SKIP_SIGNATURE=true for what is public",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud's own login, or a role of the machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or a SAS token, or a role of the machine",
    "https": "a URL that is signed, or public",
    "http": "a URL that is signed, or public",
}
