"""Connections between instances: sockets, the authenticated handshake, control messages."""
