"""The parameter server: its protocol, its log, the server process and the client."""

from shoal.sharded.ps.client import PsClient
from shoal.sharded.ps.engine import Durability, Engine
from shoal.sharded.ps.limits import Limits
from shoal.sharded.ps.security import ClientKeys, ServerKeys
from shoal.sharded.ps.server import ParameterServer
from shoal.sharded.ps.shard import Shard

__all__ = ["ClientKeys", "Durability", "Engine", "Limits", "ParameterServer", "PsClient", "ServerKeys", "Shard"]
