"""What users of scalax know, under its names: change `scalax` to `axonym.scalax` where it is imported."""

from . import sharding as sharding, utils as utils
