"""Names for code that has none: name the axes of functions of raw arrays from the names of their arguments."""

from .distribute import distribute as distribute
from .infer import MixUp as MixUp, NamedProgram as NamedProgram, UnnamedAxes as UnnamedAxes, infer as infer
