"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.data.features import Feature as Feature
from shoal.data.features import Number as Number
from shoal.data.formats import FORMATS as FORMATS
from shoal.data.formats import make_format as make_format
from shoal.data.frames.format import stream_frames as stream_frames
from shoal.data.generate import CriteoLike as CriteoLike
from shoal.data.generate import write_criteo as write_criteo
from shoal.data.joining.config import JoinConfig as JoinConfig
from shoal.data.joining.config import JoinInput as JoinInput
from shoal.data.joining.config import JoinLabel as JoinLabel
from shoal.data.joining.reader import JoinReader as JoinReader
from shoal.data.joining.reader import join as join
from shoal.data.prefetch import Prefetch as Prefetch
from shoal.data.raw import Inputs as Inputs
from shoal.data.raw import make_inputs as make_inputs
from shoal.data.samples import Samples as Samples
from shoal.data.schema import CRITEO as CRITEO
from shoal.data.schema import Schema as Schema
from shoal.data.schema import text_fid as text_fid
from shoal.data.source import BadRow as BadRow
from shoal.data.source import Cursor as Cursor
from shoal.data.source import Format as Format
from shoal.data.source import Unit as Unit
from shoal.data.stream import Batch as Batch
from shoal.data.stream import Stream as Stream
