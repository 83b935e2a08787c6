"""Everything that touches ZeroMQ or bytes: frames, addresses, keys, the sending and the receiving end."""
