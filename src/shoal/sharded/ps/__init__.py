"""The parameter server: its protocol, its log, the server process and the client."""

from shoal.sharded.ps.client.client import PsClient
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.security import ClientKeys, ServerKeys
from shoal.sharded.ps.server.engine import Durability, Engine
from shoal.sharded.ps.server.server import ParameterServer
from shoal.sharded.ps.server.shard import Shard

__all__ = ["ClientKeys", "Durability", "Engine", "Limits", "ParameterServer", "PsClient", "ServerKeys", "Shard"]
