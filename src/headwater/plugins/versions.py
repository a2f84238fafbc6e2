"""The versions of other engines that each plug-in was tested with; all others are refused."""

import os
from importlib.metadata import PackageNotFoundError, version

from headwater.errors import ConfigError

TESTED = {"vllm": ("0.32.0",), "sglang": ("0.5.23",), "ai-dynamo": ("1.6.1",)}
"""The versions with which `scripts/test-plugins` runs the contract tests."""

_ALLOW = "HEADWATER_ALLOW_UNTESTED"
"""Environment variable that allows other versions, for all plug-ins. vLLM passes no settings to
an eviction policy.
"""


def require_tested(
    package: str, *, installed: str | None = None, allow_untested: bool = False
) -> str:
    """The installed version of `package`, or ConfigError if no test ran with it.

    Interfaces of plug-ins change between releases, and a changed meaning could serve wrong
    blocks without any error. So an unknown version is an error, which the operator may
    override.
    """
    found = installed or _installed(package)
    plain = found.split("+")[0]
    if plain in TESTED[package] or allow_untested or os.environ.get(_ALLOW) == "1":
        return plain
    tested = ", ".join(TESTED[package])
    raise ConfigError(
        f"this plug-in was tested with {package} {tested}; {found} is installed. Install "
        f"{package}=={TESTED[package][-1]}, or set {_ALLOW}=1 in the environment (or "
        '"allow_untested": true in the settings) after scripts/test-plugins has passed with your '
        "version"
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"{package} is not installed in this Python environment; install it there"
        ) from error
