"""The format of log lines: text for people, or one JSON object per line for programs.

In JSON, there is also one line for each sequence that ends, with its whole record.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from headwater.metrics.ledger import RequestRecord

LogFormat = Literal["text", "json"]

_requests = logging.getLogger("headwater.requests")


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, and further fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, "ledger", {})
        return json.dumps(line, default=str)


def set_up_logs(form: LogFormat, *, speaker: str = "%(name)s") -> None:
    """Log to standard error from now on. In text lines `speaker` is before each message; by
    default it is the name of the logger."""
    text = f"%(asctime)s %(levelname)s {speaker}: %(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Headwater logs little at this level; libraries log routine events.
    logging.getLogger("headwater").setLevel(logging.INFO)
    _requests.setLevel(logging.WARNING)
    if form == "json":
        _requests.setLevel(logging.INFO)


def log_record(record: RequestRecord) -> None:
    """Write a line for a sequence that ended, if lines are JSON."""
    _requests.info("request ended", extra={"ledger": record.as_log()})
