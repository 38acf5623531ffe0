"""The names that users of scalax know: change `scalax` to `axonym.scalax` where it is imported."""

from . import sharding as sharding, utils as utils
