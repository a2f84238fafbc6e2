"""Headwater: an OpenAI-compatible serving engine built around a tiered prefix KV cache.

Importing the package imports neither torch nor a server library; `headwater.LLM` does when
it is first used, and `headwater.StructuredOutput` imports the grammar library.
"""

from typing import TYPE_CHECKING

from headwater.config import VERSION
from headwater.errors import HeadwaterError, PackageMissing
from headwater.scheduler.request import SamplingParams

if TYPE_CHECKING:
    from headwater.engine.structured import StructuredOutput
    from headwater.launch.llm import LLM

__version__ = VERSION

__all__ = ["LLM", "HeadwaterError", "SamplingParams", "StructuredOutput", "__version__"]


def __getattr__(name: str) -> object:
    try:
        if name == "LLM":
            from headwater.launch.llm import LLM

            return LLM
        if name == "StructuredOutput":
            from headwater.engine.structured import StructuredOutput

            return StructuredOutput
    except ImportError as error:
        raise PackageMissing(error, feature=f"headwater.{name}", extra="engine") from error
    raise AttributeError(f"module 'headwater' has no attribute {name!r}")
