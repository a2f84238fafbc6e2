"""`python -m headwater.plugins.dynamo MODEL` registers a Headwater engine with Dynamo.

Flags of `headwater serve` follow after `--`.
"""

from dynamo.common.backend.run import run

from headwater.plugins.dynamo.engine import HeadwaterEngine

if __name__ == "__main__":
    run(HeadwaterEngine)
