"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.data.live.address import Address as Address
from shoal.data.live.address import is_live as is_live
from shoal.data.live.address import parse_address as parse_address
from shoal.data.live.opening import open_reader as open_reader
from shoal.data.live.opening import open_writer as open_writer
from shoal.data.live.protocol import Chunk as Chunk
from shoal.data.live.protocol import Lag as Lag
from shoal.data.live.protocol import Reader as Reader
from shoal.data.live.protocol import Writer as Writer
from shoal.data.live.stream import LiveStream as LiveStream
