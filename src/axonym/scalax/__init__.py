"""The names of scalax: change `scalax` to `axonym.scalax` where you import it."""

from . import sharding as sharding, utils as utils
