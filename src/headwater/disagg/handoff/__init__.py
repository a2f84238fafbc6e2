"""Hand-offs of one instance: drives the state machines with scheduler, network and links."""
