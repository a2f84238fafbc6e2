"""Makes a double importable under a package's name and version, if the package is not
installed."""

import sys
from email.message import Message
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from importlib.util import find_spec
from types import ModuleType


class _Installed(Distribution):
    def __init__(self, name, version):
        self._name, self._version = name, version

    @property
    def metadata(self):
        message = Message()
        message["Name"], message["Version"] = self._name, self._version
        return message

    def read_text(self, filename):
        return None

    def locate_file(self, path):
        raise FileNotFoundError(path)


class _Finder(MetaPathFinder, Loader):
    """Every module of the package has all names of the double."""

    def __init__(
        self, package: str, distribution: str, version: str, double: ModuleType
    ) -> None:
        self.package, self._double = package, double
        self._distribution, self._version = distribution, version

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] != self.package:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__dict__.update(
            {k: v for k, v in vars(self._double).items() if not k.startswith("__")}
        )

    def find_distributions(self, context):
        if context.name == self._distribution:
            yield _Installed(self._distribution, self._version)


def install_double(package: str, distribution: str, version: str, double: ModuleType) -> None:
    """Install the double, unless the real package exists."""
    if find_spec(package) is None:
        sys.meta_path.append(_Finder(package, distribution, version, double))


def is_real(package: str) -> bool:
    """Whether `package` itself is installed, and no double stands for it."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    return all(finder.package != package for finder in finders)
