"""A device step that never ends, inside a server process.

    --kvcache-storage-backend tests.e2e.hung_device:HungDevice
    --kvcache-storage-config {"order": FILE}

The storage setting only loads this module into the engine process. The next step after FILE was
written hangs in the forward pass of the model, without the interpreter lock, like a kernel, and
removes FILE.
"""

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any, Self

from torch.nn.modules.module import register_module_forward_pre_hook

from headwater.storage import Opening
from headwater.storage.memory import MemoryConfig, MemoryStorage


class HungDevice(MemoryStorage):
    """Stores blocks in memory, and hangs a step when FILE exists."""

    @classmethod
    def open(cls, settings: Mapping[str, Any], opening: Opening) -> Self:
        order = Path(settings["order"])

        def hang(module: object, arguments: object) -> None:
            if order.exists():
                order.unlink()
                Event().wait()

        register_module_forward_pre_hook(hang)
        return cls(MemoryConfig(), opening.format)
