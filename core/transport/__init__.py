"""What every KV connector between peers needs but the moving of bytes: handles, schemas, digests, conversations.

A connector subclasses `Transport` (in `wire`), says how two ends meet and how blocks get from one pool into another,
and hands it to `PeerConnector`. Publications, leases, deadlines, digests, conversions and refusals are here.
"""
