"""`headwater serve …` of the documentation: it starts, becomes ready, and is stopped."""

import sys

from tests.e2e.live import LiveServer

flags = [word for word in sys.argv[2:] if word != "--port"]
server = LiveServer(*flags).wait_ready()
server.complete(prompt="The documentation is true. " * 20, max_tokens=4).raise_for_status()
sys.exit(server.stop())
