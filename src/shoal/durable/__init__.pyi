"""The public names, for type checkers and for `shoal.lazy`, which imports each on first use."""

from shoal.durable.basename import BasenameSave as BasenameSave
from shoal.durable.basename import find_saved as find_saved
from shoal.durable.basename import read_newest as read_newest
from shoal.durable.files import StrPath as StrPath
from shoal.durable.files import appearing as appearing
from shoal.durable.files import file_bases as file_bases
from shoal.durable.files import make_parents as make_parents
from shoal.durable.files import move_folder as move_folder
from shoal.durable.files import remove_folder as remove_folder
from shoal.durable.files import sync_folder as sync_folder
from shoal.durable.files import temporary_path as temporary_path
from shoal.durable.files import write_whole as write_whole
from shoal.durable.folder import Draft as Draft
from shoal.durable.folder import new_folder as new_folder
from shoal.durable.folder import read_folder as read_folder
from shoal.durable.manifest import MANIFEST as MANIFEST
from shoal.durable.manifest import FileDigest as FileDigest
from shoal.durable.manifest import Saved as Saved
from shoal.durable.manifest import digest_file as digest_file
from shoal.durable.manifest import read_saved as read_saved
from shoal.durable.manifest import write_saved as write_saved
from shoal.durable.replace import digests_below as digests_below
from shoal.durable.replace import finish_moves as finish_moves
from shoal.durable.replace import replace_files as replace_files
from shoal.durable.series import Found as Found
from shoal.durable.series import Series as Series
