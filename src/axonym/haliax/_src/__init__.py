"""The paths below `haliax._src` that public code imports from; the modules are the public ones."""

from .. import state_dict as state_dict, util as util
from ..nn import scan as scan
