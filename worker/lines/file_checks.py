"""What makes a line wrong that is right by itself."""

from __future__ import annotations

from worker.lines.custom_ids import CustomIds
from worker.lines.endpoint import Endpoint
from worker.lines.line_error import LineError
from worker.lines.names_model import names_model
from worker.lines.request_line import RequestLine


class FileChecks:
    """Compares each line of one file with the lines before it and with what the file was submitted for.

    A custom_id may stand once, and each line names the endpoint that the file was submitted for, if it was for one.
    A strict file is OpenAI's: without such an endpoint all lines name the first one's, and those that name a model name
    the same one, and one that is served. What is kept is 16 bytes of each custom_id.
    """

    def __init__(self, *, endpoint: str | None, is_strict: bool, served_model: str) -> None:
        self._custom_ids = CustomIds()
        self._endpoint = endpoint
        self._is_strict = is_strict
        self._served_model = served_model
        self._endpoints: dict[Endpoint, None] = {}  # in the order of the file
        self._model: str | None = None  # the first that a line names
        self._has_other_models = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Those of the good lines so far, in the order of their first."""
        return tuple(self._endpoints)

    @property
    def model(self) -> str | None:
        """The model that the good lines name, the served one if they name none; None if they name several."""
        return None if self._has_other_models else self._model or self._served_model

    def add(self, line: RequestLine) -> None:
        """Take the file's next line. Raises LineError if it is a bad one: the lines after it do not see it then."""
        self._check_endpoint(line)
        if self._is_strict:
            self._check_model(line)
        self._custom_ids.add(line)
        self._endpoints[line.endpoint] = None
        model = line.body.model
        self._has_other_models |= None not in (model, self._model) and model != self._model
        self._model = self._model or model

    def _check_endpoint(self, line: RequestLine) -> None:
        wanted, whose = self._endpoint, "the endpoint that the job was submitted for"
        if wanted is None and self._is_strict:
            wanted, whose = next(iter(self._endpoints), None), "as the first line has it"
        if wanted not in (None, line.endpoint):
            raise _refusal(line, f"url is {line.endpoint}; accepted: {wanted}, {whose}", "url_mismatch", "url")

    def _check_model(self, line: RequestLine) -> None:
        model = line.body.model
        if model is None:
            return
        if self._model not in (None, model):
            accepted = f"accepted: {self._model!r}, as a line before it has it"
            raise _refusal(line, f"model is {model!r}; {accepted}", "model_mismatch", "model")
        if not names_model(model, self._served_model):
            accepted = f"accepted: {self._served_model!r}, or leave it out"
            raise _refusal(line, f"model is {model!r}; {accepted}", "model_not_found", "model")


def _refusal(line: RequestLine, message: str, code: str, param: str) -> LineError:
    return LineError(message, code=code, index=line.index, param=param, custom_id=line.custom_id)
